"""Rounds each row of activations to float8_e4m3fn with its own scale on the GPU. The reference in torch is `chairlift.layers.linear`."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton.language as tl

from chairlift.kernels.cached_launch import jit


@jit()
def _quantise_rows_kernel(numbers_ptr, scale_ptr, x_ptr, columns, least: tl.constexpr, largest: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    mask = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), least) / largest
    tl.store(scale_ptr + row, scale)
    # The division rounds too, hence the clamp.
    numbers = tl.clamp(x / scale, -largest, largest)
    tl.store(numbers_ptr + row * columns + offsets, numbers.to(numbers_ptr.dtype.element_ty), mask=mask)


def quantise_rows(x: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns contiguous x [rows, columns] as float8_e4m3fn and a scale per row, fp32 [rows, 1].

    A row's largest magnitude, or `least` if that is larger, becomes the dtype's largest number.
    """
    rows, columns = x.shape
    numbers = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = 1 << (columns - 1).bit_length()
    # A warp has 32 lanes with at least 8 values each.
    warps = min(max(block // 256, 1), 16)
    largest = torch.finfo(torch.float8_e4m3fn).max
    _quantise_rows_kernel[(rows,)](numbers, scale, x, columns, least=least, largest=largest, block=block, num_warps=warps)
    return numbers, scale
