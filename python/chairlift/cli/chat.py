"""`chairlift chat`: a conversation in the terminal or over a pipe."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any

from chairlift.cli import flags
from chairlift.cli.sampling import add_engine, add_sampling, sampling_settings
from chairlift.engine.client import AsyncEngine
from chairlift.errors import InvalidRequest

_EXAMPLES = """\
examples:
  chairlift chat
  chairlift chat --system "Answer in one short sentence." --temperature 0
  echo "What is a chairlift?" | chairlift chat

In the chat, /reset starts a new conversation, /exit or Ctrl-D exits, and Ctrl-C stops an answer.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "chat", summary, _EXAMPLES, run)
    flags.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling(parser, max_tokens=None)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Chats until the input ends."""
    with suppress(ImportError):
        import readline  # noqa: F401 (adds line editing to `input`)
    sampling = sampling_settings(args)
    # asyncio.Runner instead of asyncio.run: while the user types no event loop runs, and Ctrl-C acts as at any prompt.
    with asyncio.Runner() as runner:
        chat = Chat(AsyncEngine(args.engine), sampling, args.system)
        runner.run(chat.engine.start(args.started))
        try:
            if sys.stdin.isatty():
                print(f"{args.engine.model}: /reset starts a new conversation, /exit exits, Ctrl-C stops an answer")
            while (line := _read_line()) is not None and line != "/exit":
                if line == "/reset":
                    chat.reset()
                elif line:
                    try:
                        runner.run(chat.answer(line))
                    except KeyboardInterrupt:
                        print(" [stopped]")
        finally:
            runner.run(chat.engine.close())
    return 0


def _read_line() -> str | None:
    """The next line of input, stripped; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


class Chat:
    """One conversation."""

    def __init__(self, engine: AsyncEngine, sampling: Mapping[str, Any], system: str | None) -> None:
        self.engine = engine
        self._sampling = sampling
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Removes all messages but the system message."""
        self._messages: list[dict[str, str]] = list(self._system)

    async def answer(self, question: str) -> None:
        """Streams the answer to standard output. The conversation keeps an answer that was stopped, up to that point."""
        messages = [*self._messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        try:
            prompt = self.engine.tokenizer.chat(messages)
            async with aclosing(self.engine.generate(prompt, self.engine.default_params(**self._sampling))) as outputs:
                async for output in outputs:
                    pieces.append(output.text)
                    print(output.text, end="", flush=True)
            print()
        except InvalidRequest as error:
            print(f"chairlift: {error} (/reset starts a new conversation)", file=sys.stderr)
        finally:
            if pieces:
                self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
