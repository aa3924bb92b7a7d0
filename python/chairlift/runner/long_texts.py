"""Computes texts that have more tokens than a step in parts, so that others need not wait for all of them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from chairlift import _core

MAX_LONG_TEXTS = 4
"""Long texts whose states are kept between steps. Others are computed whole, so that many of them take no more memory."""


def long_texts_bytes(longest: int, step_tokens: int, hidden_size: int) -> int:
    """Most bytes that the states of long texts take: 32 bits for each number of each token."""
    return MAX_LONG_TEXTS * longest * hidden_size * 4 if longest > step_tokens else 0


class Blocks(Protocol):
    """The part of `_core.Encoder` that computes texts in parts."""

    @property
    def blocks(self) -> int:
        """The number of blocks."""

    def advance(self, text: _core.PartialText, blocks: int) -> None:
        """Computes a text up to its first `blocks` blocks."""

    def finish(self, text: _core.PartialText, out: np.ndarray) -> None:
        """Computes the rest of a text."""


class LongTexts:
    """The long texts of an encoder that have been computed in part, by batch slot.

    A step with a tenth of a text's tokens computes a tenth of the blocks, for all of its tokens.
    """

    def __init__(self, encoder: Blocks, step_tokens: int) -> None:
        self._encoder, self._step_tokens = encoder, step_tokens
        self._texts: dict[int, _core.PartialText] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def advance(self, slot: int, ids: np.ndarray, types: np.ndarray, computed: int) -> None:
        """Computes the part of the blocks that the first `computed` tokens are of the text in `slot`, if it is a long one."""
        blocks = self._encoder.blocks * computed // len(ids)
        if len(ids) <= self._step_tokens or blocks == 0:
            return
        if slot not in self._texts:
            if len(self._texts) == MAX_LONG_TEXTS:
                return
            self._texts[slot] = _core.PartialText(ids, types)
        self._encoder.advance(self._texts[slot], blocks)

    def finish(self, slot: int, out: np.ndarray) -> bool:
        """Writes the result of the text in `slot` to `out` [1, width]. False if nothing of it has been computed."""
        text = self._texts.pop(slot, None)
        if text is not None:
            self._encoder.finish(text, out)
        return text is not None

    def forget(self, slot: int) -> None:
        """Forgets what has been computed of the text in `slot`."""
        self._texts.pop(slot, None)
