"""Rounds each row of activations to float8_e4m3fn with its own scale on the GPU. The reference in torch is `chairlift.layers.linear`."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels import LARGEST
from chairlift.kernels.cached_launch import jit

MAX_WARPS = 16


@triton.jit
def store_rounded(numbers_ptr, scale_ptr, row, columns, offsets, x, least, largest):
    """Stores a whole row x, of fp32 and 0 behind its columns, as numbers of 8 bits and a scale."""
    scale = tl.maximum(tl.max(tl.abs(x), 0), least) / largest
    tl.store(scale_ptr + row, scale)
    # The division rounds too, hence the clamp.
    numbers = tl.clamp(x / scale, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(numbers_ptr + row * columns + offsets, numbers.to(numbers_ptr.dtype.element_ty), mask=offsets < columns)


@jit()
def _quantise_rows_kernel(numbers_ptr, scale_ptr, x_ptr, columns, least: tl.constexpr, largest: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    store_rounded(numbers_ptr, scale_ptr, row, columns, offsets, x, least, largest)


def quantise_rows(x: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns contiguous x [rows, columns] as float8_e4m3fn and a scale per row, fp32 [rows, 1].

    A row's largest magnitude, or `least` if that is larger, becomes the dtype's largest number.
    """
    rows, columns = x.shape
    numbers, scale = rounded_rows(x, rows, columns)
    block, warps = whole_row(columns)
    _quantise_rows_kernel[(rows,)](numbers, scale, x, columns, least=least, largest=LARGEST, block=block, num_warps=warps)
    return numbers, scale


def whole_row(columns: int) -> tuple[int, int]:
    """The block and the warps of a program that has a whole row."""
    block = 1 << (columns - 1).bit_length()
    # A warp has 32 lanes with at least 8 values each.
    return block, min(max(block // 256, 1), MAX_WARPS)


def rounded_rows(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised float8_e4m3fn [rows, columns] and fp32 scales [rows, 1], on x's device."""
    return x.new_empty(rows, columns, dtype=torch.float8_e4m3fn), x.new_empty(rows, 1, dtype=torch.float32)
