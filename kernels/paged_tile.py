"""Functions shared by the decode and prefill attention kernels: loads of KV tiles, scores, and FlashAttention's online softmax.

Names are FlashAttention's: a tile has BLOCK_M query rows and BLOCK_N keys; m_i is the running maximum of each row, l_i the running sum of
exponentials, acc the unnormalised output. Scores are in base 2, for the hardware's exponential. The reference in torch is
`chairlift.layers.attention`.
"""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_kv_tile(
    base_ptr, blocks, offs_n, in_range, block_stride: tl.constexpr, token_stride: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr
):
    """Loads keys or values [BLOCK_N, HEAD_DIM] of the tokens at `offs_n` in `blocks`; rows outside `in_range` are zero.

    Strides are compile-time constants so that the compiler can prove 16-byte alignment and emit wide loads.
    """
    padded_dim: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    offs_d = tl.arange(0, padded_dim)
    ptrs = base_ptr + (blocks.to(tl.int64) * block_stride + offs_n * token_stride)[:, None] + offs_d[None, :]
    # Unwritten cache memory may hold NaN, and 0 * NaN is NaN.
    if MASKED and padded_dim != HEAD_DIM:
        return tl.load(ptrs, mask=in_range[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=in_range[:, None], other=0.0)
    elif padded_dim != HEAD_DIM:
        return tl.load(ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def qk_tile(q, k, qk_scale, cap, SOFTCAP: tl.constexpr):
    """Returns scores q @ k^T * qk_scale or, with a soft cap, cap * tanh(q @ k^T * qk_scale / cap)."""
    # "ieee" keeps fp32 inputs from being rounded to tf32.
    qk = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * qk_scale
    if SOFTCAP:
        # tanh(x) = 2 sigmoid(2x) - 1: a quotient of exponentials would overflow.
        qk = cap * (2 * tl.sigmoid(qk) - 1)
    return qk


@triton.jit
def softmax_update(qk, v, m_i, l_i, acc):
    """Online softmax: m_i, l_i and acc after one more tile of scores and values."""
    # A row without a visible key has m = -inf, and -inf - -inf is NaN.
    m_new = tl.maximum(m_i, tl.max(qk, 1))
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(qk - finite[:, None])
    alpha = tl.exp2(m_i - finite)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m_new, l_i * alpha + tl.sum(p, 1), acc


@triton.jit
def add_sink(sink, m_i, l_i, acc):
    """l_i and acc after an attention sink: a key that every query sees and that has no value."""
    m_new = tl.maximum(m_i, sink)
    alpha = tl.exp2(m_i - m_new)
    return l_i * alpha + tl.exp2(sink - m_new), acc * alpha[:, None]


class AttentionMetadata(NamedTuple):
    """The positions of a step's sequences, int32.

    Sequence i has row slots[i] of `block_tables`; other fields are as in the step buffers.
    """

    block_tables: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor


class Scoring(NamedTuple):
    """A layer's attention options: see `chairlift.layers.attention.paged_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    scales: tuple[torch.Tensor, torch.Tensor] | None = None


def spread_heads(
    groups: int, keys: torch.Tensor, values: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """A cache and its scales with a KV head for each group of query heads. A single KV head may be that of several groups."""
    if groups == keys.shape[1]:
        return keys, values, scales or (None, None)
    repeated = (scales[0].repeat(groups), scales[1].repeat(groups)) if scales else (None, None)
    return keys.expand(-1, groups, -1, -1), values.expand(-1, groups, -1, -1), repeated


def score_factors(scoring: Scoring) -> tuple[float, float]:
    """The factor and the soft cap of `qk_tile`, in base 2."""
    cap = scoring.softcap
    return (2 * scoring.scale / cap, cap * LOG2E.value) if cap else (scoring.scale * LOG2E.value, 0.0)
