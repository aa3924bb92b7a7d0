"""Repetition, presence and frequency penalties."""

from __future__ import annotations

import numpy as np

from chairlift.sampling import SamplingParams


class Penalties:
    """The token counts and penalties of one sequence.

    The repetition penalty applies to tokens of the prompt and the output (as in transformers: positive logits are divided by it,
    negative ones multiplied). Presence and frequency penalties apply to the output (as in OpenAI's API: subtracted once, or once per
    occurrence). The cost per step depends on the number of distinct tokens, not on the vocabulary.
    """

    def __init__(self, params: SamplingParams, tokens: np.ndarray, prompt_len: int) -> None:
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.repetition, self.presence, self.frequency = map(np.float32, penalties)
        distinct, inverse = np.unique(tokens, return_inverse=True)
        self.places = {token: place for place, token in enumerate(distinct.tolist())}
        self.distinct = distinct.astype(np.int64)
        self.counts = np.bincount(inverse[prompt_len:], minlength=len(distinct)).astype(np.float32)

    def apply(self, logits: np.ndarray) -> None:
        """Penalises the logits [vocabulary] of the sequence's next token."""
        found = logits[self.distinct]
        if self.repetition != 1:
            found = np.where(found > 0, found / self.repetition, found * self.repetition)
        logits[self.distinct] = found - self.counts * self.frequency - (self.counts > 0) * self.presence

    def add(self, token: int) -> None:
        """Counts the next token of the output."""
        place = self.places.setdefault(token, len(self.places))
        if place == len(self.distinct):
            self.distinct = np.append(self.distinct, token)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[place] += 1
