"""Repetition, presence and frequency penalties."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.sampling import SamplingParams


class Penalties:
    """The token counts and penalties of one sequence.

    The repetition penalty applies to tokens of the prompt and the output (as in transformers: positive logits are divided by it,
    negative ones multiplied). Presence and frequency penalties apply to the output (as in OpenAI's API: subtracted once, or once per
    occurrence). The cost per step depends on the number of distinct tokens, not on the vocabulary.
    """

    def __init__(self, params: SamplingParams, tokens: np.ndarray, prompt_len: int, device: torch.device) -> None:
        self.repetition, self.presence, self.frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        distinct, inverse = np.unique(tokens, return_inverse=True)
        self.places = {token: place for place, token in enumerate(distinct.tolist())}
        self.distinct = torch.from_numpy(distinct.astype(np.int64)).to(device)
        counts = np.bincount(inverse[prompt_len:], minlength=len(distinct)).astype(np.float32)
        self.counts = torch.from_numpy(counts).to(device)

    def apply(self, logits: torch.Tensor) -> None:
        """Penalises the logits [vocabulary] of the sequence's next token."""
        found = logits[self.distinct]
        if self.repetition != 1.0:
            found = torch.where(found > 0, found / self.repetition, found * self.repetition)
        logits[self.distinct] = found - self.counts * self.frequency - (self.counts > 0) * self.presence

    def add(self, token: int) -> None:
        """Counts the next token of the output."""
        place = self.places.setdefault(token, len(self.places))
        if place == len(self.distinct):
            self.distinct = torch.cat((self.distinct, self.distinct.new_tensor([token])))
            self.counts = torch.cat((self.counts, self.counts.new_zeros(1)))
        self.counts[place] += 1
