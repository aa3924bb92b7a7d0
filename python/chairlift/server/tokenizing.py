"""Tokenizes what requests send: the only way from a route to a tokenizer.

A text's length is checked before it is tokenized, and long texts wait for their turn, so that requests can take neither the event loop
nor much memory, however many there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from chairlift.errors import ContextExceeded
from chairlift.template_process import MAX_PROCESSES

if TYPE_CHECKING:
    from chairlift.tokenizer import Tokenizer

LONG = 1 << 15
"""Characters of a request above which it waits for its turn. Fewer take some 10 ms, more need up to 300 bytes of memory each."""

MAX_CHARACTERS = 1 << 20
"""Maximum length of a text that need not fit into the context, because its tokens are counted or truncated."""


class Tokenizing:
    """The threads in which a server tokenizes. Texts run without the GIL, chat templates in processes of their own."""

    def __init__(self) -> None:
        self._renderers = ThreadPoolExecutor(MAX_PROCESSES, "render")
        self._long_texts = ThreadPoolExecutor(1, "tokenize")
        """One thread: a megabyte may take 300 MB while it is tokenized."""

    async def encode(
        self,
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

        if sum(map(len, texts)) <= LONG:
            return await asyncio.to_thread(_both, check, encode)
        await asyncio.to_thread(check)
        return await asyncio.get_running_loop().run_in_executor(self._long_texts, encode)

    async def chat(
        self,
        tokenizer: Tokenizer,
        conversation: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        limit: int,
        *,
        must_fit: bool = True,
    ) -> list[int]:
        """Applies the chat template with `variables` and returns the conversation's tokens. See `encode` for `limit` and `must_fit`."""

        def render() -> tuple[list[tuple[str, bool]], list[int] | None]:
            pieces = tokenizer.render(conversation, **variables)
            _check(tokenizer, [text for text, _ in pieces], limit, must_fit, "prompt")
            short = sum(len(text) for text, _ in pieces) <= LONG
            return pieces, tokenizer.encode_pieces(pieces) if short else None

        loop = asyncio.get_running_loop()
        pieces, ids = await loop.run_in_executor(self._renderers, render)
        return await loop.run_in_executor(self._long_texts, tokenizer.encode_pieces, pieces) if ids is None else ids


def _both(check: Callable[[], None], encode: Callable[[], list[list[int]]]) -> list[list[int]]:
    check()
    return encode()


def _check(tokenizer: Tokenizer, pieces: Sequence[str], limit: int, must_fit: bool, param: str) -> None:
    """Raises InvalidRequest for a text that is too long even if all its tokens are the longest of the vocabulary."""
    length = sum(map(len, pieces))
    if length <= limit or not (must_fit or length > MAX_CHARACTERS):
        return
    if (least := sum(map(tokenizer.min_tokens, pieces))) <= limit:
        return
    message = f"This model's maximum context length is {limit} tokens. However, the {param} has {length} characters"
    if must_fit:
        message += f", which are at least {least} tokens. Please reduce the length of the {param}."
    else:
        message += f": at most {MAX_CHARACTERS} are counted, or truncated."
    raise ContextExceeded(message, param=param, limit=limit, prompt=least)
