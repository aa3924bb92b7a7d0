"""Log-probabilities of tokens and of the top tokens, from the model's unchanged logits at temperature 1. Without torch."""

from __future__ import annotations

import numpy as np

from chairlift import _core

CHUNK_LOGITS = 1 << 24
"""Logits per chunk when a prompt is scored: 64 MB, and as much again for intermediate results."""


def score(pool: _core.ThreadPool, logits: np.ndarray, tokens: np.ndarray, count: int) -> np.ndarray:
    """A line for each of tokens [M], given logits [M, vocabulary] in fp32, computed on the threads of `pool`.

    int32 [M, 3 + 2 * count]: the token, its log-probability, its rank (1 is the most likely), the `count` most likely tokens and their
    log-probabilities. Log-probabilities are the bits of an fp32.
    """
    lines = pool.score(logits, tokens.astype(np.int64), count)
    return np.frombuffer(lines, dtype=np.int32).reshape(-1, 3 + 2 * count)


def logprobs(lines: np.ndarray) -> np.ndarray:
    """The log-probabilities of the lines' tokens, float32 [M]."""
    return np.ascontiguousarray(lines[:, 1]).view(np.float32)


def packed(lines: np.ndarray, count: int) -> bytes:
    """The lines with only `count` of their top tokens."""
    have = (lines.shape[1] - 3) // 2
    return np.concatenate((lines[:, : 3 + count], lines[:, 3 + have : 3 + have + count]), 1).tobytes()


class PromptLogprobs:
    """How many of a prompt's log-probabilities have been computed, so that each is reported once.

    The request's sequences share it, because they share the prompt's blocks. `tag` is the request's first tag.
    """

    def __init__(self, tag: int, tokens: np.ndarray, count: int) -> None:
        self.tag, self.tokens, self.count = tag, tokens, count
        self.scored = 0
        """Positions scored so far."""

    @property
    def complete(self) -> bool:
        """Whether all tokens but the first, which has no log-probability, are scored."""
        return self.scored == len(self.tokens) - 1

    def take(self, first: int, after: int) -> range:
        """The positions of a step's chunk [first, after) whose next tokens are not scored yet; marks them as scored."""
        positions = range(max(first, self.scored), min(after, len(self.tokens) - 1))
        self.scored = max(self.scored, positions.stop)
        return positions
