"""Tokenizes what requests send: the only way from a route to a tokenizer.

A text's length is checked before it is tokenized, and long texts wait for their turn, so that requests can take neither the event loop
nor much memory, however many there are. A group of tenants has one turn at a time, so that it cannot keep others waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from chairlift.errors import ContextExceeded, InvalidRequest
from chairlift.server.work import WorkThreads
from chairlift.template_process import MAX_PROCESSES
from chairlift.trim import trim

if TYPE_CHECKING:
    from chairlift.tokenizer import Tokenizer

P = ParamSpec("P")
R = TypeVar("R")

LONG = 1 << 15
"""Characters of a request above which it waits for its turn. Fewer take some 10 ms, more need up to 300 bytes of memory each."""

MAX_CHARACTERS = 1 << 20
"""Maximum length of a text that need not fit into the context, because its tokens are counted or truncated, or it is white space."""


NICE = 10
"""How much lower the priority of the thread that tokenizes long texts is than that of running requests.

It gets a tenth of a core beside other threads. With SCHED_IDLE it would get 0.3 %, and an honest tenant's text would take minutes.
"""


class Tokenizing:
    """The threads in which a server tokenizes. Texts run without the GIL, chat templates in processes of their own.

    `group` is always the group of the request's tenant.
    """

    def __init__(self) -> None:
        self._renderers = _Threads(MAX_PROCESSES, "render")
        self._long_texts = _Threads(1, "tokenize", NICE)
        """It has one thread, because a text of one megabyte may take 300 MB of memory while it is tokenized."""

    async def encode(
        self,
        group: str,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        limit: int,
        *,
        must_fit: bool = True,
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> list[list[int]]:
        """Returns the tokens of each text.

        `must_fit`: each text's tokens must be at most `limit`, the model's maximum; those that surely are more raise InvalidRequest for
        `param`. Otherwise only texts above MAX_CHARACTERS do so.
        """

        def check() -> None:
            for text in texts:
                _check(tokenizer, [text], limit, must_fit, param)

        def encode() -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return await self._checked(group, check, encode, sum(map(len, texts)))

    async def encode_pairs(
        self, group: str, tokenizer: Tokenizer, first: str, seconds: Sequence[str], limit: int, *, param: str
    ) -> list[tuple[list[int], int | None]]:
        """Returns the tokens of `first` with each of `seconds`, and where the second begins; see `encode` for `limit`."""

        def check() -> None:
            for second in seconds:
                _check(tokenizer, [first, second], limit, True, param)

        def encode() -> list[tuple[list[int], int | None]]:
            return [tokenizer.encode_pair(first, second) for second in seconds]

        return await self._checked(group, check, encode, len(seconds) * len(first) + sum(map(len, seconds)))

    async def _checked(self, group: str, check: Callable[[], None], encode: Callable[[], R], length: int) -> R:
        """Calls both functions in a thread, the second one in its turn if `length` characters are many."""

        def check_and_encode() -> R:
            check()
            return encode()

        if length <= LONG:
            return await asyncio.to_thread(check_and_encode)
        await asyncio.to_thread(check)
        return await self.in_turn(group, length, encode)

    async def in_turn(self, group: str, length: int, encode: Callable[[], R]) -> R:
        """Calls a function that tokenizes `length` characters in a thread, in its turn if they are many."""
        if length <= LONG:
            return await asyncio.to_thread(encode)
        return await self._long_texts.run(group, _then_trim, encode)

    async def chat(
        self,
        group: str,
        tokenizer: Tokenizer,
        conversation: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        limit: int,
        *,
        must_fit: bool = True,
        kept: bool = True,
    ) -> list[int]:
        """Applies the chat template with `variables` and returns the conversation's tokens. See `encode` for `limit` and `must_fit`.

        With `kept` the tokens of the conversation are kept for later requests of the group, and those of earlier ones are used.
        """
        tokenized = partial(tokenizer.encode_pieces, group=group if kept else None)

        def render() -> tuple[list[tuple[str, bool]], list[int] | None]:
            pieces = tokenizer.render(conversation, **variables)
            _check(tokenizer, [text for text, _ in pieces], limit, must_fit, "prompt")
            short = sum(len(text) for text, _ in pieces) <= LONG
            return pieces, tokenized(pieces) if short else None

        contents = _rendered_surely(conversation)
        if len(contents) > LONG:
            await asyncio.to_thread(_check, tokenizer, [contents], limit, must_fit, "prompt")
        pieces, ids = await self._renderers.run(group, render)
        return await self._long_texts.run(group, _then_trim, tokenized, pieces) if ids is None else ids


class _Threads:
    """Threads in which each group has one call at a time, so that a call waits for at most one of each other group."""

    def __init__(self, number: int, name: str, nice: int = 0) -> None:
        self._executor = WorkThreads(number, name, _lower_priority, (nice,))
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The turn of each group with calls."""

    async def run(self, group: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a function in a thread when it is the turn of `group`."""
        turn, loop = self._turns.setdefault(group, asyncio.Lock()), asyncio.get_running_loop()
        await turn.acquire()

        def end_turn(_: Future[R]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(turn.release)

        call = self._executor.submit(function, *args, **kwargs)
        # The call of a request that is cancelled goes on in its thread, and so does the turn.
        call.add_done_callback(end_turn)
        return await asyncio.wrap_future(call)


def _then_trim(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function that needs much memory, and returns that to the system: it is in small blocks, of which glibc would keep most."""
    try:
        return function(*args, **kwargs)
    finally:
        trim()


def _lower_priority(nice: int) -> None:
    """Lowers the priority of the calling thread, where threads have priorities."""
    if sys.platform == "linux":
        os.nice(nice)


def _rendered_surely(conversation: Sequence[Mapping[str, Any]]) -> str:
    """Returns what every chat template renders: the contents of the messages but the assistant's, whose reasoning templates leave out."""
    contents = (message.get("content") for message in conversation if message.get("role") != "assistant")
    return "".join(content for content in contents if isinstance(content, str))


def _check(tokenizer: Tokenizer, pieces: Sequence[str], limit: int, must_fit: bool, param: str) -> None:
    """Raises InvalidRequest for a text that is too long even if all its tokens are the longest of the vocabulary.

    White space, and a word without an end, may be few tokens, so there is a limit on characters, too.
    """
    length = sum(map(len, pieces))
    if length <= limit:
        return
    most = max(MAX_CHARACTERS, limit * tokenizer.longest_token) if must_fit else MAX_CHARACTERS
    least = sum(map(tokenizer.min_tokens, pieces))
    if length <= most and not (must_fit and least > limit):
        return
    message = f"This model's maximum context length is {limit} tokens. However, the {param} has {length} characters"
    if must_fit and least > limit:
        message += f", which are at least {least} tokens. Please reduce the length of the {param}."
    else:
        message += f": at most {most} are tokenized."
    if least > limit:
        raise ContextExceeded(message, param=param, limit=limit, prompt=least)
    raise InvalidRequest(message, param=param, code="context_length_exceeded")
