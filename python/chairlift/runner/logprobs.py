"""How likely tokens were, and which were the likeliest, at temperature 1 and with nothing changed."""

from __future__ import annotations

import numpy as np
import torch

from chairlift import _core

PIECE = 1 << 24
"""Logits that are looked at in one go for a prompt: 64 MB of them, and as much again for what is made of them."""


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> np.ndarray:
    """One line for each of tokens [M], given logits [M, vocabulary] in fp32, with the `count` likeliest beside it.

    int32 [M, 3 + 2 * count]: the token, its log-probability, its rank (1: none is likelier), the likeliest, the best first, and their
    log-probabilities. Log-probabilities are the bits of an fp32.
    """
    if logits.is_cpu:
        lines = _core.score(logits.contiguous().numpy(), tokens.numpy(), count, threads=torch.get_num_threads())
        return np.frombuffer(lines, dtype=np.int32).reshape(-1, 3 + 2 * count)
    return score_in_torch(logits, tokens, count)


def score_in_torch(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> np.ndarray:
    """As `score`, on whatever device the logits are; equally likely tokens come in any order."""
    total = logits.logsumexp(1, keepdim=True)
    own = logits.gather(1, tokens.unsqueeze(1))
    rank = (logits > own).sum(1, keepdim=True, dtype=torch.int32) + 1
    values, likeliest = logits.topk(count)
    parts = (tokens.unsqueeze(1).int(), (own - total).view(torch.int32), rank, likeliest.int(), (values - total).view(torch.int32))
    return torch.cat(parts, 1).cpu().numpy()


def logprobs(lines: np.ndarray) -> np.ndarray:
    """The log-probabilities of the lines' own tokens, float32 [M]."""
    return np.ascontiguousarray(lines[:, 1]).view(np.float32)


def packed(lines: np.ndarray, count: int) -> bytes:
    """The lines with so many of their likeliest tokens, at most as many as they have."""
    have = (lines.shape[1] - 3) // 2
    return np.concatenate((lines[:, : 3 + count], lines[:, 3 + have : 3 + have + count]), 1).tobytes()
