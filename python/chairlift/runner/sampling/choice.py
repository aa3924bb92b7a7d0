"""Draws a token per row of logits on the host."""

from __future__ import annotations

import numpy as np

from chairlift import _core

FAILED = -1
"""The result for a row whose logits are not finite or that has no allowed token."""
LOWEST_TEMPERATURE = 1e-5
"""Lower temperatures are raised to this: all weight is on the most likely token, and fp32 divisions would overflow."""


def choose(
    logits: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    uniform: np.ndarray,
    *,
    threads: int,
) -> np.ndarray:
    """Draws a token per row of logits [N, vocabulary] in fp32: int32 [N], FAILED if a logit is NaN or the best is not finite.

    Temperature 0 takes the first of the most likely tokens. Otherwise `top_k` (int64, 0: all), then `top_p` and `min_p` (fp64) select
    tokens, and `uniform`, fp64 in [0, 1), is the position in their cumulative distribution, most likely first.
    """
    drawn = _core.choose(logits, temperature, top_k, top_p, min_p, uniform, threads=threads)
    return np.frombuffer(drawn, dtype=np.int32).copy()
