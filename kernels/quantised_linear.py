"""Multiplies a few rows of activations by a quantised weight on the GPU, without a copy of the weight in 16 bits."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment"

from __future__ import annotations

import torch
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.weight_tile import BLOCK_N, as_bytes, block_k, load_weight

MAX_ROWS = 64
"""With more rows, products bound the time, and a dequantised weight is multiplied faster by the vendor's library."""


# Without this, Triton would compile a variant when a step first has one row, or a multiple of 16.
@jit(do_not_specialize=["rows"])
def _quantised_linear_kernel(
    out_ptr,
    x_ptr,
    numbers_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    rows,
    outs,
    ins,
    pitch,
    groups,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outs
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, ins, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + offs_m[:, None] * ins + columns[None, :], mask=(offs_m < rows)[:, None] & (columns < ins)[None, :], other=0.0)
        group = start // GROUP if GROUP else 0
        weight = load_weight(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K)
        # The numbers are exact in every floating-point dtype, so the scale can wait.
        product = tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision="ieee")
        if GROUP:
            product *= tl.load(scale_ptr + offs_n * groups + group, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        acc += product
    if not GROUP:
        acc *= tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    mask = (offs_m < rows)[:, None] & mask_n[None, :]
    tl.store(out_ptr + offs_m[:, None] * outs + offs_n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def quantised_linear(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Maps contiguous x [rows, in], of at most MAX_ROWS rows, to [rows, out]. The weight is a `Quantised` of `chairlift.layers.linear`."""
    rows, outs = len(x), len(numbers)
    out = x.new_empty(rows, outs)
    _quantised_linear_kernel[(-(-outs // BLOCK_N),)](
        out,
        x,
        as_bytes(numbers),
        scale,
        zero,
        bias,
        rows,
        outs,
        x.shape[1],
        numbers.shape[1],
        scale.shape[1],
        GROUP=group,
        BLOCK_M=block_m(rows),
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k(group),
        num_warps=4,
        num_stages=4,
    )
    return out


def block_m(rows: int) -> int:
    """BLOCK_M: all rows, and at least the 16 that `tl.dot` needs."""
    return max(16, 1 << (rows - 1).bit_length())
