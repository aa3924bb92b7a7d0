"""Frequencies of the rotary position embedding. Without torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def inverse_frequencies(
    head_dim: int,
    theta: float,
    kind: str = "default",
    *,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Radians per position for each of the head_dim / 2 pairs, fp32.

    `linear` divides all frequencies by `factor`. `llama3` divides those with wavelengths above original / low_freq_factor, keeps those
    with wavelengths below original / high_freq_factor, and interpolates between.
    """
    # Rounded to fp32 at each step, as in transformers. The power alone is in fp64, because numpy's in fp32 depends on the processor.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)
    if kind == "linear":
        return frequencies / np.float32(factor)
    if kind == "llama3":
        periods = frequencies * np.float32(original_max_position_embeddings) / np.float32(2 * math.pi)
        kept = ((periods - np.float32(low_freq_factor)) / np.float32(high_freq_factor - low_freq_factor)).clip(0, 1)
        return (frequencies * (kept + (1 - kept) / np.float32(factor))).astype(np.float32)
    return frequencies
