"""Penalties for tokens that a sequence holds already."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.sampling import SamplingParams


class Penalties:
    """What one sequence has said so far, and how much that counts against saying it again.

    The repetition penalty is for tokens of the prompt or the output (transformers' rule: positive logits are divided by it,
    negative ones multiplied); presence and frequency penalties are for the output alone (OpenAI's rule: subtracted once, or once
    for each time).
    """

    def __init__(self, params: SamplingParams, tokens: np.ndarray, prompt_len: int, vocab_size: int, device: torch.device) -> None:
        self.repetition, self.presence, self.frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.seen[torch.from_numpy(tokens.astype(np.int64)).to(device)] = True
        counts = np.bincount(tokens[prompt_len:], minlength=vocab_size).astype(np.float32)
        self.counts = torch.from_numpy(counts).to(device)

    def apply(self, logits: torch.Tensor) -> None:
        """Changes the logits [vocabulary] of the sequence's next token."""
        if self.repetition != 1.0:
            penalised = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            torch.where(self.seen, penalised, logits, out=logits)
        if self.presence != 0.0 or self.frequency != 0.0:
            logits -= self.counts * self.frequency + (self.counts > 0) * self.presence

    def add(self, token: int) -> None:
        """Counts one more token of the output."""
        self.seen[token] = True
        self.counts[token] += 1
