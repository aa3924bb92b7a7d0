"""Sorts the choices of tokens by expert on the GPU, in one launch."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton.language as tl

from chairlift.kernels.cached_launch import jit

BLOCK = 1024
"""Choices that a program reads at a time."""


@jit(do_not_specialize=["choices"])
def _sort_experts_kernel(order_ptr, ends_ptr, experts_ptr, choices, BLOCK: tl.constexpr):
    # A program finds its own expert's choices, and counts those of earlier experts, which are stored before them.
    expert = tl.program_id(0)
    earlier = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, choices, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        chosen = tl.load(experts_ptr + offsets, mask=offsets < choices, other=1 << 30)
        earlier += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    at = tl.sum(earlier, 0)
    tl.store(ends_ptr + expert, at + tl.sum(own, 0))
    for start in range(0, choices, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        chosen = tl.load(experts_ptr + offsets, mask=offsets < choices, other=1 << 30)
        found = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + at + tl.cumsum(found, 0) - 1, offsets, mask=found > 0)
        at += tl.sum(found, 0)


def sort_experts(experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts contiguous choices [tokens, used], int64, of `count` experts, those of an expert in the order of their tokens.

    Returns the sorted choices' places before, int32 [tokens * used], and where each expert's choices end, int32 [count].
    """
    order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    ends = torch.empty(count, dtype=torch.int32, device=experts.device)
    _sort_experts_kernel[(count,)](order, ends, experts, experts.numel(), BLOCK=BLOCK, num_warps=4)
    return order, ends
