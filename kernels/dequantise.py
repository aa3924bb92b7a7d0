"""Dequantises a weight on the GPU in one launch, for products of many rows."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.weight_tile import BLOCK_N, as_bytes, block_k, load_weight


@jit()
def _dequantise_kernel(
    out_ptr,
    numbers_ptr,
    scale_ptr,
    zero_ptr,
    outs,
    ins,
    pitch,
    groups,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    group = start // GROUP if GROUP else 0
    weight = load_weight(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K, tl.float16)
    scale = tl.load(scale_ptr + offs_n * groups + group, mask=offs_n < outs, other=0.0).to(tl.float32)
    columns = start + tl.arange(0, BLOCK_K)
    mask = (offs_n < outs)[:, None] & (columns < ins)[None, :]
    whole = (weight.to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_n.to(tl.int64)[:, None] * ins + columns[None, :], whole, mask=mask)


def dequantise(
    numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int, ins: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [out, in] of a `Quantised` of `chairlift.layers.linear` in `dtype`."""
    outs, size = len(numbers), block_k(group)
    out = torch.empty(outs, ins, dtype=dtype, device=numbers.device)
    grid = (-(-outs // BLOCK_N), -(-ins // size))
    _dequantise_kernel[grid](
        out,
        as_bytes(numbers),
        scale,
        zero,
        outs,
        ins,
        numbers.shape[1],
        scale.shape[1],
        GROUP=group,
        BLOCK_N=BLOCK_N,
        BLOCK_K=size,
        num_warps=4,
    )
    return out
