"""Merges the partial results that `paged_decode` leaves where a context is split (Flash-Decoding)."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.launch_settings import device_limits
from chairlift.kernels.paged_tile import LOG2E

PROGRAMS_PER_SM = 16
"""Programs in the grid per multiprocessor."""
BLOCK_N = 16
"""Partial results that a program loads at once."""


@jit()
def _paged_combine_kernel(
    out_ptr, partial_out_ptr, lse_ptr, sinks_ptr, work_ptr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr
):
    # In the work list, merges follow the splits: token, first partial result, stride between them, and their number.
    merges_ptr = work_ptr + 4 * (1 + tl.load(work_ptr))
    offs_d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    for unit in range(tl.program_id(0), tl.load(work_ptr + 1) * HEADS, tl.num_programs(0)):
        head = unit % HEADS
        merge_ptr = merges_ptr + 4 * (unit // HEADS)
        token = tl.load(merge_ptr).to(tl.int64)
        first = tl.load(merge_ptr + 1).to(tl.int64)
        step = tl.load(merge_ptr + 2)
        count = tl.load(merge_ptr + 3)
        m_i = tl.full((), float("-inf"), tl.float32)
        l_i = tl.zeros((), tl.float32)
        if sinks_ptr is not None:
            # The sink is added here and not in the first split, which a window may leave out.
            m_i = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            l_i += 1.0
        acc = tl.zeros((offs_d.shape[0],), tl.float32)
        for start_n in range(0, count, BLOCK_N):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            rows = (first + offs_n * step) * HEADS + head
            lse = tl.load(lse_ptr + rows, mask=offs_n < count, other=float("-inf"))
            mask = (offs_n < count)[:, None] & (offs_d < HEAD_DIM)[None, :]
            partial_out = tl.load(partial_out_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
            m_new = tl.maximum(m_i, tl.max(lse, 0))
            # A token sees a key in one of its first two splits, so m_new is finite.
            p = tl.exp2(lse - m_new)
            alpha = tl.exp2(m_i - m_new)
            acc = acc * alpha + tl.sum(partial_out * p[:, None], 0)
            l_i = l_i * alpha + tl.sum(p, 0)
            m_i = m_new
        tl.store(out_ptr + (token * HEADS + head) * HEAD_DIM + offs_d, (acc / l_i).to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)


def paged_combine(
    out: torch.Tensor, parts: torch.Tensor, lses: torch.Tensor, *, work: torch.Tensor, merges: int, sinks: torch.Tensor | None
) -> None:
    """Writes to out [T, heads, D] the tokens that `work` (see `paged_decode`) merges from parts [n, heads, D], fp32.

    lses [n, heads] are the log-sum-exps of the parts in base 2, minus infinity for an empty part. `merges` bounds the number of merges.
    """
    heads, dim = out.shape[1:]
    grid = (min(merges * heads, PROGRAMS_PER_SM * device_limits(out.device).multiprocessors),)
    _paged_combine_kernel[grid](out, parts, lses, sinks, work, HEADS=heads, HEAD_DIM=dim, BLOCK_N=BLOCK_N, num_warps=4)


def paged_combine_reference(parts: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The same in torch for one token: parts [n, heads, D] and lses [n, heads] give [heads, D]."""
    weights = lses / LOG2E.value
    if sinks is not None:
        weights = torch.cat((weights, sinks.float()[None]))
    weights = weights.softmax(0)[: len(parts)]
    merged: torch.Tensor = (parts * weights.unsqueeze(-1)).sum(0)
    return merged
