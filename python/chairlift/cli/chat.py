"""`chairlift chat`: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any

from chairlift.cli.sampling import sampling
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.client import AsyncEngine
from chairlift.errors import InvalidRequest


def run(given: Mapping[str, Any], engine: EngineConfig, server: ServerConfig, began: float) -> int:
    """Talks until the input ends."""
    with suppress(ImportError):
        import readline  # noqa: F401 (gives `input` its line editing)
    chosen = sampling(given)
    # A runner and not asyncio.run: the loop rests while the user types, so that Ctrl-C means what it means at a prompt.
    with asyncio.Runner() as runner:
        chat = Chat(AsyncEngine(engine), chosen, given["system"])
        runner.run(chat.engine.start(began))
        try:
            if sys.stdin.isatty():
                print(f"{engine.model}: /reset forgets, /exit leaves, Ctrl-C stops an answer")
            while (line := _read()) is not None and line != "/exit":
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


def _read() -> str | None:
    """The next line, without its ends; None when there are no more."""
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
        """Forgets everything but the system's message."""
        self._messages: list[dict[str, str]] = list(self._system)

    async def answer(self, question: str) -> None:
        """Prints the answer as it comes; what was shown is remembered, even when it is stopped half way."""
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
