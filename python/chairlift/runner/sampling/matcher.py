"""Grammar matchers: they decide which tokens may come next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

log = logging.getLogger("chairlift")


class Matcher(Protocol):
    """The position of one sequence in a grammar.

    The sampler gets a new matcher each time a sequence is assigned a slot, and lets it accept the output so far. It then calls `mask`
    before each draw and `accept` after it, on the engine's thread. An exception ends only this sequence.
    """

    def mask(self, bitmask: np.ndarray, index: int) -> None:
        """Sets the bits of allowed tokens in row `index` of int32 [rows, ceil(vocabulary / 32)], which is zero.

        Token t is bit t % 32 of word t // 32. A row without any bit ends the sequence with an error.
        """

    def accept(self, token: int) -> None:
        """Advances by the sampled token, which may be the end of the sequence. Raises if the grammar does not allow it."""


def allowed(matched: Sequence[tuple[int, Matcher]], vocabulary: int) -> np.ndarray:
    """Returns the tokens that the matchers allow, uint8 [matchers, bytes]: token t is bit t % 8 of byte t // 8."""
    bitmask = np.zeros((len(matched), -(-vocabulary // 32)), dtype=np.int32)
    for index, (_, matcher) in enumerate(matched):
        try:
            matcher.mask(bitmask, index)
        except Exception:
            log.exception("grammar error: the request ends with an error")
            bitmask[index] = 0
    return bitmask.astype("<i4", copy=False).view(np.uint8)


def accept(matched: Sequence[tuple[int, Matcher]], chosen: np.ndarray, failed: int) -> None:
    """Advances the matchers by the tokens `chosen` [N]. If a matcher raises, its token becomes `failed`."""
    for i, matcher in matched:
        if chosen[i] != failed:
            try:
                matcher.accept(int(chosen[i]))
            except Exception:
                log.exception("grammar error: the request ends with an error")
                chosen[i] = failed
