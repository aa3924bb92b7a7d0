"""Counts the tokens of prompts with the upstream's own tokenizer, where one is given."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np

from chairlift.gate.model_files import VOCABULARY
from chairlift.gate.prompt import TokenIds, tokens
from chairlift.server.tokenizing import MAX_CHARACTERS, Tokenizing
from chairlift.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

PART_CHARACTERS = 64
"""Characters that take as long to tokenize as a part takes besides its own."""


class TokenCounter:
    """Counts with a tokenizer, in threads. What a group of tenants has sent before is not tokenized again."""

    def __init__(self, tokenizer: Tokenizer, tokenizing: Tokenizing) -> None:
        self._tokenizer, self._tokenizing = tokenizer, tokenizing
        self._has_failed = False
        tokenizer.encode_pieces([("", True)])  # prepares it, which takes half a second, before requests come

    async def tokens(self, group: str, parts: list[bytes]) -> np.ndarray:
        """Returns the tokens of a prompt's parts, int32. After MAX_CHARACTERS they are those of the bytes."""
        length = sum(map(len, parts)) + PART_CHARACTERS * len(parts)
        return await self._tokenizing.in_turn(group, length, partial(self._encode, group, parts))

    def _encode(self, group: str, parts: list[bytes]) -> np.ndarray:
        texts: list[tuple[str, bool]] = []
        size = 0
        for part in parts:
            size += len(part)
            if size > MAX_CHARACTERS or isinstance(part, TokenIds):
                break
            # JSON's escapes are no part of the text that a template makes.
            texts.append((part.decode("utf-8", "replace").replace("\\n", "\n").replace('\\"', '"'), True))
        try:
            ids = self._tokenizer.encode_pieces(texts, group)
        except Exception as error:  # the tokenizers package raises no other, for a text without tokens in its vocabulary
            if not self._has_failed:
                log.warning("the tokenizer failed, so bytes are counted where it does: %s", error)
                self._has_failed = True
            return tokens(parts)
        return np.concatenate([_folded(np.array(ids, np.uint32)), *map(_counted, parts[len(texts) :])])


def _counted(part: bytes) -> np.ndarray:
    return _folded(np.frombuffer(part, "<u4")) if isinstance(part, TokenIds) else tokens([part])


def _folded(ids: np.ndarray) -> np.ndarray:
    """Token ids as the engine's, which has fewer."""
    return (ids % VOCABULARY).astype(np.int32)
