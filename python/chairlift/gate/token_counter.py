"""Counts the tokens of prompts with the upstream's own tokenizer, where one is given."""

from __future__ import annotations

from functools import partial

import numpy as np

from chairlift.gate.model_files import VOCABULARY
from chairlift.gate.prompt import Prompt, TokenIds, read_prompt, tokens
from chairlift.server.tokenizing import MAX_CHARACTERS, Tokenizing
from chairlift.tokenizer import Tokenizer


class TokenCounter:
    """Reads prompts with a tokenizer, in threads. What a group of tenants has sent before is not tokenized again."""

    def __init__(self, tokenizer: Tokenizer, tokenizing: Tokenizing) -> None:
        self._tokenizer, self._tokenizing = tokenizer, tokenizing

    async def read(self, group: str, raw: bytes | bytearray) -> Prompt:
        """Returns the prompt of a body: see `read_prompt`."""
        return await self._tokenizing.in_turn(group, len(raw), partial(read_prompt, raw, partial(self._encode, group)))

    def _encode(self, group: str, parts: list[bytes]) -> np.ndarray:
        """Returns the tokens of a prompt's parts, int32; those of their bytes where the parts are too long for the tokenizer."""
        if sum(map(len, parts)) > MAX_CHARACTERS:
            return tokens(parts)
        return np.concatenate([np.empty(0, np.int32), *(self._ids(group, part) for part in parts)])

    def _ids(self, group: str, part: bytes) -> np.ndarray:
        if isinstance(part, TokenIds):
            ids = np.frombuffer(part, dtype="<u4")
        else:
            # JSON's escapes are no part of the text that a template makes.
            text = part.decode("utf-8", "replace").replace("\\n", "\n").replace('\\"', '"')
            ids = np.array(self._tokenizer.encode_pieces([(text, True)], group), dtype=np.uint32)
        return (ids % VOCABULARY).astype(np.int32)
