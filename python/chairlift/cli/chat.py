"""`chairlift chat`: a conversation in the terminal or over a pipe."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from chairlift.cli import flags
from chairlift.cli.flags import add_engine, add_sampling, sampling_settings
from chairlift.cli.remote import add_api_key, client_key, model_names, stream_chat
from chairlift.cli.text_input import text_input
from chairlift.engine.client import AsyncEngine
from chairlift.errors import ChairliftError, InvalidRequest, ModelNotFound

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
"""What makes a terminal print dimmed text, and plain text again."""

_EXAMPLES = """\
examples:
  chairlift chat
  chairlift chat --system "Answer in one short sentence." --temperature 0
  chairlift chat --url http://127.0.0.1:8000         chat with a running server
  echo "What is a chairlift?" | chairlift chat

In the chat, /reset starts a new conversation, /exit or Ctrl-D exits, and Ctrl-C stops an answer.
"""


def add_parser(commands: Any, summary: str) -> None:
    """Adds the command and its flags."""
    parser = flags.add_command(commands, "chat", summary, _EXAMPLES, run)
    flags.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--url", metavar="URL", help="chat with a running server instead of loading a model")
    add_api_key(parser)
    add_sampling(parser, max_tokens=None)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Chats until the input ends."""
    with suppress(ImportError):
        import readline  # noqa: F401 (adds line editing to `input`)
    sampling = sampling_settings(args)
    conversation = Conversation(args.system)
    if args.url is not None:
        return _run_remote(args, conversation, {name: value for name, value in sampling.items() if value is not None})
    # asyncio.Runner instead of asyncio.run: while the user types no event loop runs, and Ctrl-C acts as at any prompt.
    with asyncio.Runner() as runner:
        engine = AsyncEngine(args.engine)
        runner.run(engine.start(args.started))
        try:
            converse(args.engine.model, conversation, lambda question: runner.run(_answer(engine, sampling, conversation, question)))
        finally:
            runner.run(engine.close())
    return 0


def _run_remote(args: argparse.Namespace, conversation: Conversation, sampling: Mapping[str, Any]) -> int:
    """Chats with the server at `--url`."""
    key = client_key(args)
    model = args.model or next(iter(model_names(args.url, key)), None)
    if model is None:
        raise ModelNotFound(f"the server at {args.url} lists no model: name one")
    converse(f"{model} at {args.url}", conversation, answer_from(args.url, key, model, conversation, sampling), ChairliftError)
    return 0


def answer_from(url: str, key: str | None, model: str, conversation: Conversation, sampling: Mapping[str, Any]) -> Callable[[str], None]:
    """Returns what answers a question: it streams the answer of a server's model to standard output. Raises ChairliftError."""

    def answer(question: str) -> None:
        with conversation.exchange(question) as (messages, pieces):
            shown = _Shown(pieces)
            for reasoning, text in stream_chat(url, key, {"model": model, "messages": messages, **sampling}):
                shown.add(reasoning, text)
            print()

    return answer


def converse(name: str, conversation: Conversation, answer: Callable[[str], None], harmless: type[ChairliftError] = InvalidRequest) -> None:
    """Reads questions until the input ends, and calls `answer` for each. The chat goes on after `harmless` errors."""
    if sys.stdin.isatty():
        print(f"{name}: /reset starts a new conversation, /exit exits, Ctrl-C stops an answer")
    while (line := _read_line()) is not None and line != "/exit":
        if line == "/reset":
            conversation.reset()
        elif line:
            try:
                answer(line)
            except KeyboardInterrupt:
                print(" [stopped]")
            except harmless as error:
                print(f"chairlift: {error} (/reset starts a new conversation)", file=sys.stderr)


def _read_line() -> str | None:
    """The next line of input, stripped; None at its end."""
    try:
        return text_input(lambda: input("> " if sys.stdin.isatty() else "")).strip()
    except EOFError:
        return None
    except InvalidRequest as error:
        if not sys.stdin.isatty():
            raise
        print(f"chairlift: {error}", file=sys.stderr)
        return ""


class Conversation:
    """The messages of a conversation."""

    def __init__(self, system: str | None) -> None:
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Removes all messages but the system message."""
        self._messages: list[dict[str, str]] = list(self._system)

    @contextmanager
    def exchange(self, question: str) -> Iterator[tuple[list[dict[str, str]], list[str]]]:
        """Yields the messages up to the question, and a list for the pieces of the answer.

        The conversation keeps an answer that was stopped, up to that point.
        """
        messages, pieces = [*self._messages, {"role": "user", "content": question}], list[str]()
        try:
            yield messages, pieces
        finally:
            if pieces:
                self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


async def _answer(engine: AsyncEngine, sampling: Mapping[str, Any], conversation: Conversation, question: str) -> None:
    """Streams the answer of the engine to standard output."""
    with conversation.exchange(question) as (messages, pieces):
        shown = _Shown(pieces)
        async with aclosing(engine.chat(messages, engine.default_params(**sampling))) as outputs:
            async for output in outputs:
                shown.add(output.reasoning or "", output.text)
        print()


class _Shown:
    """Prints an answer as it comes. A terminal also gets the model's reasoning, dimmed; the conversation keeps the answer alone."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces
        self._reasoning = False

    def add(self, reasoning: str, text: str) -> None:
        """Prints the next part of the reasoning and of the answer."""
        if reasoning and sys.stdout.isatty():
            print(f"{_DIM}{reasoning}{_PLAIN}", end="", flush=True)
            self._reasoning = True
        if text:
            if self._reasoning:
                print("\n")
                self._reasoning = False
            self._pieces.append(text)
            print(text, end="", flush=True)
