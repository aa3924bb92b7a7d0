"""Rotary position embedding."""

from __future__ import annotations

import torch

from chairlift.layers.attention import AttentionPlan, Scales, write_kv
from chairlift.layers.norm import rms_norm


def rotations(positions: torch.Tensor, frequencies: torch.Tensor, scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotation at integer positions [tokens], times `scales` [head_dim / 2], each fp32 [tokens, head_dim / 2]."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cosines, sines = angles.cos(), angles.sin()
    return (cosines, sines) if scales is None else (cosines.mul_(scales), sines.mul_(scales))


def spread(head_dim: int, rotated: int) -> list[int]:
    """The order of a head's numbers in which the pairs of a rotation of the first `rotated` ones are half a head apart."""
    rest = (head_dim - rotated) // 2
    low, high = range(rotated // 2), range(rotated // 2, rotated)
    return [*low, *range(rotated, rotated + rest), *high, *range(rotated + rest, head_dim)]


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates heads [tokens, heads, head_dim]. Pairs are (i, i + head_dim / 2)."""
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
    rotated_first: bool = False,
    eps: float = 0.0,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Rotates the queries and keys of qkv [tokens, heads + 2 * kv_heads, head_dim] and stores keys and values (see `write_kv`).

    `norms`, [head_dim] for queries and keys, apply an RMS norm to each head first (Qwen3), or after its rotation if it is
    `rotated_first` (Hunyuan). Returns the queries [tokens, heads, head_dim]; qkv is undefined afterwards.
    """
    if qkv.is_cuda:
        # triton is only installed for GPUs.
        from chairlift.kernels import rope_write as kernel

        return kernel.rope_write(qkv, *rotation, keys, values, plan.slots, norms=norms, rotated_first=rotated_first, eps=eps, scales=scales)
    kv_heads = keys.shape[1]
    q, k, v = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]
    if rotated_first:
        q, k = rotate(q, rotation), rotate(k, rotation)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    if not rotated_first:
        q, k = rotate(q, rotation), rotate(k, rotation)
    write_kv(k, v, keys, values, plan, scales=scales)
    return q
