"""Progress of a prompt's log-probabilities. Without torch, because the engine's loop uses it."""

from __future__ import annotations

import numpy as np


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
