"""Which positions of a prompt have their log-probabilities still to be told; without torch, for the engine's loop keeps it."""

from __future__ import annotations

import numpy as np


class PromptLogprobs:
    """How far the log-probabilities of one request's prompt have been told, so that each is told once.

    All its sequences share it, since they share the blocks of the prompt: what one finds in the cache, it or another computed. It goes
    with a sequence to each row that this takes. `tag` is its owner's number for it.
    """

    def __init__(self, tag: int, tokens: np.ndarray, count: int) -> None:
        self.tag, self.tokens, self.count = tag, tokens, count
        self.told = 0
        """Positions that were taken."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left to tell: the first token has none."""
        return self.told == len(self.tokens) - 1

    def take(self, first: int, after: int) -> range:
        """Of the positions from `first` to before `after`, which are being computed, those whose next tokens are to be told now."""
        positions = range(max(first, self.told), min(after, len(self.tokens) - 1))
        self.told = max(self.told, positions.stop)
        return positions
