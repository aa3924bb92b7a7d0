"""A token for each row of logits on the host: the likeliest, or one drawn."""

from __future__ import annotations

import numpy as np
import torch

from chairlift import _core

FAILED = -1
"""The answer for a row whose logits are not finite, or that may draw nothing."""
LOWEST_TEMPERATURE = 1e-5
"""Below this all weight is on the likeliest token anyway, and fp32 divisions overflow."""


def choose(
    logits: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
    """A token for each row of logits [N, vocabulary] in fp32; int32 [N], FAILED where there is NaN or the best is not finite.

    Temperature 0 takes the first of the likeliest. Otherwise `top_k` (int64, 0: all) and of these `top_p` and `min_p` (fp64) leave
    some tokens, and `uniform`, fp64 in [0, 1), says where in their cumulative distribution, likeliest first, the token is.
    """
    settings = (temperature, top_k, top_p, min_p, uniform)
    return np.frombuffer(_core.choose(logits.contiguous().numpy(), *settings, threads=torch.get_num_threads()), dtype=np.int32).copy()
