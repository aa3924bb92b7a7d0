"""Multiplies a few rows of activations in fp8 by a weight in fp8 on the GPU."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment"

from __future__ import annotations

import torch
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.launch_settings import DeviceLimits, LaunchSettings, device_limits
from chairlift.kernels.weight_tile import block_m, store_outputs

MAX_ROWS = 64
"""With more rows, the vendor's library is as fast."""
BLOCK_K = 128
"""Inputs of a tile."""
MAX_STAGES = 8
"""Tiles in flight or in use, if shared memory has room for them."""


# Without this, Triton would compile a variant when a step first has one row, or a multiple of 16.
@jit(do_not_specialize=["rows"])
def _fp8_linear_kernel(
    out_ptr,
    x_ptr,
    x_scale_ptr,
    numbers_ptr,
    scale_ptr,
    bias_ptr,
    rows,
    outs,
    ins,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # The weight is the left operand: tensor cores multiply 64 rows of that at a time, and as few as 8 columns of the right one.
    offs_n, offs_m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    known_n, known_m = offs_n < outs, offs_m < rows
    weights = numbers_ptr + offs_n.to(tl.int64)[:, None] * ins
    inputs = x_ptr + offs_m[None, :] * ins
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, ins, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        weight = tl.load(weights + columns[None, :], mask=known_n[:, None] & (columns < ins)[None, :], other=0.0)
        x = tl.load(inputs + columns[:, None], mask=known_m[None, :] & (columns < ins)[:, None], other=0.0)
        acc = tl.dot(weight, x, acc)
    store_outputs(out_ptr, acc, scale_ptr, x_scale_ptr, bias_ptr, offs_m, offs_n, rows, outs)


def fp8_linear(
    x: torch.Tensor, x_scale: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Maps rows [rows, in] of e4m3, at most MAX_ROWS, to [rows, out] of `dtype`.

    The weight is e4m3 [out, in]. Scales are fp32, of each row of activations [rows, 1] and of each output [out, 1].
    """
    (rows, ins), outs = x.shape, len(numbers)
    out = torch.empty(rows, outs, dtype=dtype, device=x.device)
    settings = fp8_settings(rows, outs, device_limits(x.device))
    grid = (-(-outs // settings.BLOCK_N),)
    _fp8_linear_kernel[grid](out, x, x_scale, numbers, scale, bias, rows, outs, ins, BLOCK_K=BLOCK_K, **settings._asdict())
    return out


def fp8_settings(rows: int, outs: int, limits: DeviceLimits) -> LaunchSettings:
    """Settings for a product of so many rows and outputs.

    Chosen by measurement on an H200: a program for each 64 outputs, with many tiles in flight, reads a weight nearly as fast as memory
    does; 128 outputs where each multiprocessor has several programs anyway.
    """
    block = block_m(rows)
    wide = outs >= 128 * limits.multiprocessors
    block_n = 128 if wide else 64
    most = limits.shared_memory // ((block + block_n) * BLOCK_K)
    return LaunchSettings(block, block_n, 4, min(most, MAX_STAGES // 2 if wide else MAX_STAGES))
