"""Multiplies a few rows of activations by an 8-bit weight on the GPU, without a copy of the weight in 16 bits."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_ROWS = 64
"""With more rows, products bound the time, and a dequantised weight is multiplied faster by the vendor's library."""
BLOCK_N, BLOCK_K = 32, 128
"""Outputs of a program, and inputs at a time."""


# Without this, Triton would compile a variant when a step first has one row, or a multiple of 16.
@triton.jit(do_not_specialize=["rows"])
def _int8_linear_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    rows,
    outs,
    ins,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    weight_rows = offs_n.to(tl.int64)[:, None] * ins
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, ins, BLOCK_K):
        k = start + offs_k
        x = tl.load(x_ptr + offs_m[:, None] * ins + k[None, :], mask=(offs_m < rows)[:, None] & (k < ins)[None, :], other=0.0)
        weight = tl.load(weight_ptr + weight_rows + k[None, :], mask=(offs_n < outs)[:, None] & (k < ins)[None, :], other=0)
        # Integers of 8 bits are exact in every floating-point dtype, so the scale can wait.
        acc += tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision="ieee")
    acc *= tl.load(scale_ptr + offs_n, mask=offs_n < outs, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < outs, other=0.0).to(tl.float32)[None, :]
    mask = (offs_m < rows)[:, None] & (offs_n < outs)[None, :]
    tl.store(out_ptr + offs_m[:, None] * outs + offs_n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Maps contiguous x [rows, in], of at most MAX_ROWS rows, to [rows, out].

    The weight is int8 [out, in] times a scale per output, fp32 [out, 1]. The reference in torch is `chairlift.layers.linear`.
    """
    rows, outs = len(x), len(weight)
    out = x.new_empty(rows, outs)
    _int8_linear_kernel[(triton.cdiv(outs, BLOCK_N),)](
        out,
        x,
        weight,
        scale,
        bias,
        rows,
        outs,
        x.shape[1],
        BLOCK_M=block_m(rows),
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
        num_stages=4,
    )
    return out


def block_m(rows: int) -> int:
    """BLOCK_M: all rows, and at least the 16 that `tl.dot` needs."""
    return max(16, int(triton.next_power_of_2(rows)))
