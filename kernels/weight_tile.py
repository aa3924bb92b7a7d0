"""What the kernels that multiply or dequantise quantised weights share: a tile of a weight, and the outputs of a product."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_N, BLOCK_K = 32, 128
"""Outputs and inputs of a tile."""
_MORE = tl.constexpr(2.0**120)
_MXFP4 = tl.constexpr(2.0**126)


@triton.jit
def load_weight(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K: tl.constexpr, dtype: tl.constexpr):
    """The numbers [outputs, BLOCK_K] from column `start` on in `dtype`, less their zeros, before they are scaled. They are exact.

    A row of numbers takes `pitch` bytes. All columns of the tile are in one group.
    Conversions from integers are slow, hence the arithmetic on bits.
    """
    if zero_ptr is not None:
        low, high = load_halves(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K, tl.float16)
        return tl.join(low, high).reshape(offs_n.shape[0], BLOCK_K).to(dtype)
    rows, columns = numbers_ptr + offs_n.to(tl.int64)[:, None] * pitch, start + tl.arange(0, BLOCK_K)
    bits = tl.load(rows + columns[None, :], mask=(offs_n < outs)[:, None] & (columns < pitch)[None, :], other=0)
    if numbers_ptr.dtype.element_ty == tl.int8:
        return ((((bits.to(tl.int16) & 0xFF) ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152).to(dtype)
    # Devices below 8.9 have no instruction for it. The masks leave one bit of the sign, which the extension repeats.
    signed = bits.to(tl.int8, bitcast=True).to(tl.int16)
    if dtype == tl.bfloat16:
        # The bf16 with the exponent and the mantissa of an e4m3 is 2^120 times smaller, the fp16 is 256 times smaller.
        return ((signed << 4) & -0x7810).to(tl.bfloat16, bitcast=True) * _MORE
    return (((signed << 7) & -0x4080).to(tl.float16, bitcast=True) * 256).to(dtype)


@triton.jit
def load_halves(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K: tl.constexpr, dtype: tl.constexpr):
    """The numbers of 4 bits of even and of odd columns, each [outputs, BLOCK_K / 2], less their zeros, in a `dtype` of 16 bits."""
    mask_n = offs_n < outs
    pairs = start // 2 + tl.arange(0, BLOCK_K // 2)
    rows = numbers_ptr + offs_n.to(tl.int64)[:, None] * pitch
    packed = tl.load(rows + pairs[None, :], mask=mask_n[:, None] & (pairs < pitch)[None, :], other=0).to(tl.int16)
    # The fp16 with these bits is 1024 more than the integer, the bf16 is 128 more.
    more: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x4300
    zero = (tl.load(zero_ptr + offs_n * groups + group, mask=mask_n, other=0).to(tl.int16) | more).to(dtype, bitcast=True)[:, None]
    low, high = (packed & 0xF) | more, (packed >> 4) | more
    return low.to(dtype, bitcast=True) - zero, high.to(dtype, bitcast=True) - zero


@triton.jit
def load_mxfp4(numbers_ptr, exponents_ptr, offs_n, start, outs, pitch, groups, BLOCK_K: tl.constexpr, dtype: tl.constexpr):
    """The numbers of MXFP4 of even and of odd columns, each [outputs, BLOCK_K / 2], times their scales, in a `dtype` of 16 bits.

    They are exact in bf16.
    """
    mask_n, rows = (offs_n < outs)[:, None], offs_n.to(tl.int64)[:, None]
    pairs, blocks = start // 2 + tl.arange(0, BLOCK_K // 2), start // 32 + tl.arange(0, BLOCK_K // 32)
    packed = tl.load(numbers_ptr + rows * pitch + pairs[None, :], mask=mask_n & (pairs < pitch)[None, :], other=0).to(tl.int16)
    exponents = tl.load(exponents_ptr + rows * groups + blocks[None, :], mask=mask_n & (blocks < groups)[None, :], other=0)
    # An exponent e stands for 2^(e - 127), of which fp32 has the bits; 0 would be a subnormal number.
    scale = tl.maximum(exponents.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
    scale = scale.to(tl.bfloat16) if dtype == tl.bfloat16 else scale
    scale = tl.broadcast_to(scale[:, :, None], (offs_n.shape[0], BLOCK_K // 32, 16)).reshape(offs_n.shape[0], BLOCK_K // 2)
    if dtype == tl.bfloat16:
        # The bf16 with the exponent and the mantissa of an e2m1 is 2^126 times smaller, the fp16 is 2^14 times smaller.
        low, high = ((packed & 8) << 12) | ((packed & 7) << 6), ((packed & 0x80) << 8) | ((packed & 0x70) << 2)
        return low.to(tl.bfloat16, bitcast=True) * _MXFP4 * scale, high.to(tl.bfloat16, bitcast=True) * _MXFP4 * scale
    low, high = ((packed & 8) << 12) | ((packed & 7) << 9), ((packed & 0x80) << 8) | ((packed & 0x70) << 5)
    low, high = low.to(tl.float16, bitcast=True) * 16384.0, high.to(tl.float16, bitcast=True) * 16384.0
    return (low * scale).to(dtype), (high * scale).to(dtype)


@triton.jit
def load_pairs(rows_ptr, known_m, start, ins, BLOCK_K: tl.constexpr):
    """The inputs of even and of odd columns [BLOCK_K / 2, rows], of 16 bits each, of rows [1, rows] of pointers."""
    dtype = rows_ptr.dtype.element_ty
    pairs = start // 2 + tl.arange(0, BLOCK_K // 2)
    both = tl.load(rows_ptr.to(tl.pointer_type(tl.int32)) + pairs[:, None], mask=known_m[None, :] & (pairs < ins // 2)[:, None], other=0)
    return both.to(tl.int16).to(dtype, bitcast=True), (both >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def store_outputs(out_ptr, acc, scale_ptr, x_scale_ptr, bias_ptr, offs_m, offs_n, rows, outs):
    """Stores sums [outputs, rows] as [rows, outputs], times the scales of outputs and of rows, plus a bias; each of these may be None."""
    mask_n, mask_m = offs_n < outs, offs_m < rows
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    if x_scale_ptr is not None:
        acc *= tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    mask = mask_n[:, None] & mask_m[None, :]
    tl.store(out_ptr + offs_m[None, :] * outs + offs_n[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers as the kernels take them: Triton has no fp8 for devices below 8.9."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers


def block_k(group: int) -> int:
    """BLOCK_K for a weight whose scales are each of `group` columns, or of a whole row if `group` is 0."""
    return min(group, BLOCK_K) if group else BLOCK_K


def block_m(rows: int) -> int:
    """BLOCK_M of a product: all rows, and at least the 16 that `tl.dot` needs."""
    return max(16, 1 << (rows - 1).bit_length())
