"""What bounds an answer's form: which tokens may come next, token by token."""

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
    """One sequence's place in a grammar.

    The sampler is given a fresh one with each seat that a sequence takes, and has it accept what there is of the output; from then on
    it calls `mask` before each draw and `accept` after it, on the engine's thread. Whichever raises ends this sequence alone.
    """

    def mask(self, bitmask: torch.Tensor, index: int) -> None:
        """Says what may come next: sets bits in row `index` of int32 [rows, ceil(vocabulary / 32)], which is all zeros, on the CPU.

        Token t is bit t % 32 of word t // 32. A row without any bit ends the sequence with an error.
        """

    def accept(self, token: int) -> None:
        """Takes the token that was drawn, the end of the sequence included; raises if the grammar has no place for it."""


def mask(logits: torch.Tensor, matched: Sequence[tuple[int, Matcher]]) -> None:
    """Makes every token that its matcher does not allow impossible, in the rows of logits [N, vocabulary] that have one."""
    vocabulary = logits.shape[1]
    bitmask = torch.zeros(len(matched), -(-vocabulary // 32), dtype=torch.int32)
    for index, (_, matcher) in enumerate(matched):
        try:
            matcher.mask(bitmask, index)
        except Exception:
            log.exception("a request ends with an error, since its grammar failed")
            bitmask[index] = 0
    # Memory is little-endian on every machine that torch runs on: bytes are in the order of the tokens.
    octets = send(bitmask.numpy().view(np.uint8), logits.device).unsqueeze(2)
    forbidden = (octets & send(_BITS, logits.device) == 0).flatten(1)[:, :vocabulary]
    rows = send(np.array([i for i, _ in matched]), logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))


def accept(matched: Sequence[tuple[int, Matcher]], chosen: np.ndarray, failed: int) -> None:
    """Tells matchers of the tokens [N] that were chosen; those that raise get `failed` for theirs."""
    for i, matcher in matched:
        if chosen[i] != failed:
            try:
                matcher.accept(int(chosen[i]))
            except Exception:
                log.exception("a request ends with an error, since its grammar failed")
                chosen[i] = failed
