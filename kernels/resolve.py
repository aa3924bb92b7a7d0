"""Fills in input tokens that were not known when their step was planned, on the GPU."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _resolve_kernel(out_ptr, input_ids_ptr, last_token_ptr, count, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < count
    ids = tl.load(input_ids_ptr + offsets, mask=mask, other=0)
    open_ = ids < 0
    sampled = tl.load(last_token_ptr + -(ids + 1), mask=mask & open_, other=0)
    tl.store(out_ptr + offsets, tl.where(open_, tl.maximum(sampled, 0), ids), mask=mask)


def resolve(input_ids: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """Returns input ids [T] with -(slot + 1) replaced by last_token[slot]; last_token is [slots]. All are int32 and contiguous.

    A slot whose sample failed has a negative last token. It becomes token 0, and the result is not used.
    """
    out = torch.empty_like(input_ids)
    count = input_ids.numel()
    _resolve_kernel[(triton.cdiv(count, BLOCK),)](out, input_ids, last_token, count, block=BLOCK, num_warps=4)
    return out
