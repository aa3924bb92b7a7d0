"""Rotary position embedding: each half-pair of a head's dimensions is turned by an angle that grows with the position."""

from __future__ import annotations

import math

import torch


def inverse_frequencies(
    head_dim: int,
    theta: float,
    kind: str = "default",
    *,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192,
) -> torch.Tensor:
    """Radians per position for each of head_dim / 2 pairs, fp32.

    `linear` divides all of them by `factor`. `llama3` divides those of wavelengths longer than original / low_freq_factor, leaves
    those shorter than original / high_freq_factor, and blends between.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "linear":
        return frequencies / factor
    if kind == "llama3":
        turns = original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / factor)
    return frequencies


def rotations(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and signed sines that `rotate` wants, each [tokens, 1, head_dim], for integer positions [tokens]."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines), -1).unsqueeze(1).to(dtype), torch.cat((-sines, sines), -1).unsqueeze(1).to(dtype)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turns heads [tokens, heads, head_dim], whose pairs are (i, i + head_dim / 2)."""
    # Rolling by half swaps the halves; the sign that a rotation needs is in the sines.
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)
