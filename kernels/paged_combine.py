"""Makes one result of the partial ones that `paged_decode` leaves of a long context."""

# Triton has no types: mypy checks the launchers alone.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.paged_tile import LOG2E, multiprocessors

PROGRAMS_PER_SM = 16
"""Programs of the grid for each multiprocessor."""
PARTS = 16
"""Partial results that a program holds at once."""


@triton.jit
def _paged_combine_kernel(out_ptr, parts_ptr, lses_ptr, sinks_ptr, work_ptr, heads: tl.constexpr, dim: tl.constexpr, held: tl.constexpr):
    # Merges come after the splits in the list of work: token, first part, distance of parts, and how many.
    merges_ptr = work_ptr + 4 * (1 + tl.load(work_ptr))
    dims = tl.arange(0, triton.next_power_of_2(dim))
    for unit in range(tl.program_id(0), tl.load(work_ptr + 1) * heads, tl.num_programs(0)):
        head = unit % heads
        merge_ptr = merges_ptr + 4 * (unit // heads)
        token = tl.load(merge_ptr).to(tl.int64)
        first = tl.load(merge_ptr + 1).to(tl.int64)
        step = tl.load(merge_ptr + 2)
        count = tl.load(merge_ptr + 3)
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        if sinks_ptr is not None:
            # The sink comes in here, and not in the first split, which a window may leave out.
            top = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            total += 1.0
        mixed = tl.zeros((dims.shape[0],), tl.float32)
        for at in range(0, count, held):
            nth = at + tl.arange(0, held)
            row = (first + nth * step) * heads + head
            lses = tl.load(lses_ptr + row, mask=nth < count, other=float("-inf"))
            mask = (nth < count)[:, None] & (dims < dim)[None, :]
            parts = tl.load(parts_ptr + row[:, None] * dim + dims[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, tl.max(lses, 0))
            # A token sees something of its first two parts, so this is a number.
            weights = tl.exp2(lses - new_top)
            kept = tl.exp2(top - new_top)
            mixed = mixed * kept + tl.sum(parts * weights[:, None], 0)
            total = total * kept + tl.sum(weights, 0)
            top = new_top
        tl.store(out_ptr + (token * heads + head) * dim + dims, (mixed / total).to(out_ptr.dtype.element_ty), mask=dims < dim)


def paged_combine(
    out: torch.Tensor, parts: torch.Tensor, lses: torch.Tensor, *, work: torch.Tensor, merges: int, sinks: torch.Tensor | None
) -> None:
    """Writes to out [T, heads, D] the tokens that `work` (see `paged_decode`) merges: of parts [n, heads, D], fp32.

    lses [n, heads] are the logarithms of the sums that the parts were divided by, in base 2: minus infinity for a part that is none.
    `merges` is an upper bound of how many there are.
    """
    heads, dim = out.shape[1:]
    grid = (min(merges * heads, PROGRAMS_PER_SM * multiprocessors(out.device)),)
    _paged_combine_kernel[grid](out, parts, lses, sinks, work, heads=heads, dim=dim, held=PARTS, num_warps=4)


def paged_combine_reference(parts: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The same in torch for one token, whose parts are [n, heads, D] and lses [n, heads]: [heads, D]."""
    weights = lses / LOG2E.value
    if sinks is not None:
        weights = torch.cat((weights, sinks.float()[None]))
    weights = weights.softmax(0)[: len(parts)]
    mixed: torch.Tensor = (parts * weights.unsqueeze(-1)).sum(0)
    return mixed
