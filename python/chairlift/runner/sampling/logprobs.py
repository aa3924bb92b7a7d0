"""How likely tokens were, and which were the likeliest, at temperature 1 and with nothing changed."""

from __future__ import annotations

import numpy as np
import torch

from chairlift import _core

PIECE = 1 << 24
"""Logits that are looked at in one go for a prompt: 64 MB of them, and as much again for what is made of them."""


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> np.ndarray:
    """One line for each of tokens [M], given logits [M, vocabulary] in fp32 on the host, with the `count` likeliest beside it.

    int32 [M, 3 + 2 * count]: the token, its log-probability, its rank (1: none is likelier), the likeliest, the best first, and their
    log-probabilities. Log-probabilities are the bits of an fp32.
    """
    lines = _core.score(logits.contiguous().numpy(), tokens.numpy(), count, threads=torch.get_num_threads())
    return np.frombuffer(lines, dtype=np.int32).reshape(-1, 3 + 2 * count)


def logprobs(lines: np.ndarray) -> np.ndarray:
    """The log-probabilities of the lines' own tokens, float32 [M]."""
    return np.ascontiguousarray(lines[:, 1]).view(np.float32)


def packed(lines: np.ndarray, count: int) -> bytes:
    """The lines with so many of their likeliest tokens, at most as many as they have."""
    have = (lines.shape[1] - 3) // 2
    return np.concatenate((lines[:, : 3 + count], lines[:, 3 + have : 3 + have + count]), 1).tobytes()
