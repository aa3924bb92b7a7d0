"""Grammar matchers: they decide which tokens may come next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from chairlift.runner.copy_stream import send

log = logging.getLogger("chairlift")

_BITS = np.array([1 << bit for bit in range(8)], dtype=np.uint8)


class Matcher(Protocol):
    """The position of one sequence in a grammar.

    The sampler gets a new matcher each time a sequence is assigned a slot, and lets it accept the output so far. It then calls `mask`
    before each draw and `accept` after it, on the engine's thread. An exception ends only this sequence.
    """

    def mask(self, bitmask: torch.Tensor, index: int) -> None:
        """Sets the bits of allowed tokens in row `index` of int32 [rows, ceil(vocabulary / 32)] on the CPU, which is zero.

        Token t is bit t % 32 of word t // 32. A row without any bit ends the sequence with an error.
        """

    def accept(self, token: int) -> None:
        """Advances by the sampled token, which may be the end of the sequence. Raises if the grammar does not allow it."""


def mask(logits: torch.Tensor, matched: Sequence[tuple[int, Matcher]]) -> None:
    """Masks disallowed tokens in the rows of logits [N, vocabulary] that have a matcher."""
    vocabulary = logits.shape[1]
    bitmask = torch.zeros(len(matched), -(-vocabulary // 32), dtype=torch.int32)
    for index, (_, matcher) in enumerate(matched):
        try:
            matcher.mask(bitmask, index)
        except Exception:
            log.exception("grammar error: the request ends with an error")
            bitmask[index] = 0
    # torch only runs on little-endian machines, so the bytes are in token order.
    octets = send(bitmask.numpy().view(np.uint8), logits.device).unsqueeze(2)
    forbidden = (octets & send(_BITS, logits.device) == 0).flatten(1)[:, :vocabulary]
    rows = send(np.array([i for i, _ in matched]), logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))


def accept(matched: Sequence[tuple[int, Matcher]], chosen: np.ndarray, failed: int) -> None:
    """Advances the matchers by the tokens `chosen` [N]. If a matcher raises, its token becomes `failed`."""
    for i, matcher in matched:
        if chosen[i] != failed:
            try:
                matcher.accept(int(chosen[i]))
            except Exception:
                log.exception("grammar error: the request ends with an error")
                chosen[i] = failed
