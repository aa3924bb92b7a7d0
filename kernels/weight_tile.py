"""Reads a tile of a quantised weight, for the kernels that multiply or dequantise it."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_N, BLOCK_K = 32, 128
"""Outputs and inputs of a tile."""


@triton.jit
def load_weight(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K: tl.constexpr):
    """The numbers [outputs, BLOCK_K] from column `start` on, less their zeros, before they are scaled. They are exact in fp16.

    A row of numbers takes `pitch` bytes. All columns of the tile are in one group.
    Conversions from integers are slow, hence the arithmetic on bits.
    """
    mask_n = offs_n < outs
    rows = numbers_ptr + offs_n.to(tl.int64)[:, None] * pitch
    if zero_ptr is not None:
        pairs = start // 2 + tl.arange(0, BLOCK_K // 2)
        packed = tl.load(rows + pairs[None, :], mask=mask_n[:, None] & (pairs < pitch)[None, :], other=0).to(tl.int16)
        both = tl.join(packed & 0xF, packed >> 4).reshape(offs_n.shape[0], BLOCK_K)
        # The fp16 with these bits is 1024 more than the integer.
        zero = tl.load(zero_ptr + offs_n * groups + group, mask=mask_n, other=0).to(tl.int16)
        return (both | 0x6400).to(tl.float16, bitcast=True) - (zero | 0x6400).to(tl.float16, bitcast=True)[:, None]
    columns = start + tl.arange(0, BLOCK_K)
    bits = tl.load(rows + columns[None, :], mask=mask_n[:, None] & (columns < pitch)[None, :], other=0).to(tl.int16)
    if numbers_ptr.dtype.element_ty == tl.int8:
        return (((bits & 0xFF) ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152
    # The fp16 with the exponent and the mantissa of an e4m3 is 256 times smaller. Devices below 8.9 have no instruction for it.
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers as the kernels take them: Triton has no fp8 for devices below 8.9."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers


def block_k(group: int) -> int:
    """BLOCK_K for a weight whose scales are each of `group` columns, or of a whole row if `group` is 0."""
    return min(group, BLOCK_K) if group else BLOCK_K
