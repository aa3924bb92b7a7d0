"""Rotary position embedding: each half-pair of a head's dimensions is turned by an angle that grows with the position."""

from __future__ import annotations

import math

import torch

from chairlift.layers.attention import AttentionPlan, Scales, write_kv
from chairlift.layers.norm import rms_norm


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


def rotations(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines by which tokens at integer positions [tokens] turn, each fp32 [tokens, head_dim / 2]."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turns heads [tokens, heads, head_dim], whose pairs are (i, i + head_dim / 2)."""
    cosines, sines = (part.unsqueeze(1).to(x.dtype) for part in rotation)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)


def rope_write(
    qkv: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Turns the queries and keys of qkv [tokens, heads + 2 * kv_heads, head_dim], stores keys and values as `write_kv` does.

    With `norms`, [head_dim] for queries and for keys, each head is first scaled to root mean square 1, then by its norm (Qwen3).
    Returns the queries [tokens, heads, head_dim]; what qkv holds then means nothing.
    """
    if qkv.is_cuda:
        # Triton exists only where there is a GPU to use it.
        from chairlift.kernels import rope_write as kernel

        return kernel.rope_write(qkv, *rotation, keys, values, plan.slots, norms=norms, eps=eps, scales=scales)
    kv_heads = keys.shape[1]
    q, k, v = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    write_kv(rotate(k, rotation), v, keys, values, plan, scales=scales)
    return rotate(q, rotation)
