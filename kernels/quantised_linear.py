"""Multiplies a few rows of activations by a quantised weight on the GPU, without a copy of the weight in 16 bits."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.launch_settings import HOPPER, DeviceLimits, device_limits
from chairlift.kernels.weight_tile import as_bytes, block_k, block_m, load_halves, load_pairs, load_weight, store_outputs

MAX_ROWS, MAX_ROWS_OF_4_BITS = 128, 64
"""With more rows, products bound the time, and a dequantised weight is multiplied faster by the vendor's library."""
BLOCK_N = 64
"""Outputs of a tile: as many as tensor cores multiply at a time."""


# Without this, Triton would compile a variant when a step first has one row, or a multiple of 16.
@jit(do_not_specialize=["rows", "tiles"])
def _quantised_linear_kernel(
    out_ptr,
    parts_ptr,
    arrived_ptr,
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
    tiles,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # The weight is the left operand: tensor cores multiply 64 rows of that at a time, and as few as 8 columns of the right one.
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outs
    first = tl.program_id(1) * tiles * BLOCK_K
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, tl.minimum(first + tiles * BLOCK_K, ins), BLOCK_K):
        group = start // GROUP if GROUP else 0
        # A product takes at least 16 columns at once.
        if zero_ptr is not None and BLOCK_K >= 32 and x_ptr.dtype.element_ty.primitive_bitwidth == 16:
            even, odd = load_pairs(x_ptr + offs_m[None, :] * ins, offs_m < rows, start, ins, BLOCK_K)
            low, high = load_halves(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K, even.dtype)
            product = tl.dot(high, odd, tl.dot(low, even))
        else:
            columns = start + tl.arange(0, BLOCK_K)
            known = (offs_m < rows)[None, :] & (columns < ins)[:, None]
            x = tl.load(x_ptr + offs_m[None, :] * ins + columns[:, None], mask=known, other=0.0)
            weight = load_weight(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K, x.dtype)
            # The numbers are exact in every floating-point dtype, so the scale can wait.
            product = tl.dot(weight, x, input_precision="ieee")
        if GROUP:
            product *= tl.load(scale_ptr + offs_n * groups + group, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        acc += product
    splits = tl.num_programs(1)
    if splits > 1:
        # The last program of an output tile sums the parts of all of them, in their order.
        part = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + offs_m[None, :]
        parts = parts_ptr + tl.program_id(0) * splits * BLOCK_N * BLOCK_M + part
        tl.store(parts + tl.program_id(1) * BLOCK_N * BLOCK_M, acc)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tl.program_id(0), 1) == splits - 1:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for split in range(splits):
                acc += tl.load(parts + split * BLOCK_N * BLOCK_M, cache_modifier=".cg")
            tl.store(arrived_ptr + tl.program_id(0), 0)
            store_outputs(out_ptr, acc, None if GROUP else scale_ptr, None, bias_ptr, offs_m, offs_n, rows, outs)
    else:
        store_outputs(out_ptr, acc, None if GROUP else scale_ptr, None, bias_ptr, offs_m, offs_n, rows, outs)


def quantised_linear(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
) -> torch.Tensor:
    """Maps contiguous x [rows, in], of at most `max_rows` rows, to [rows, out]. The weight is a `Quantised` of `chairlift.layers.linear`.

    `arrived` are `counters` that no other launch uses at the same time.
    """
    (rows, ins), outs = x.shape, len(numbers)
    out, size = x.new_empty(rows, outs), block_k(group)
    block, warps, stages, tiles = tiling(rows, outs, ins, size, device_limits(x.device))
    grid = -(-outs // BLOCK_N), -(-ins // (tiles * size))
    parts = torch.empty(grid[0] * grid[1] * BLOCK_N * block if grid[1] > 1 else 0, dtype=torch.float32, device=x.device)
    _quantised_linear_kernel[grid](
        out,
        parts,
        arrived,
        x,
        as_bytes(numbers),
        scale,
        zero,
        bias,
        rows,
        outs,
        ins,
        numbers.shape[1],
        scale.shape[1],
        tiles,
        GROUP=group,
        BLOCK_M=block,
        BLOCK_N=BLOCK_N,
        BLOCK_K=size,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def counters(numbers: torch.Tensor) -> torch.Tensor:
    """A zero for each tile of outputs of a weight. Launches leave them as they were."""
    return numbers.new_zeros(triton.cdiv(len(numbers), BLOCK_N), dtype=torch.int32)


def max_rows(zero: torch.Tensor | None) -> int:
    """The rows up to which this is the faster way, for a weight with these zeros."""
    return MAX_ROWS if zero is None else MAX_ROWS_OF_4_BITS


class Tiling(NamedTuple):
    """How a product is divided: keyword arguments of a launch, and how many tiles of inputs a program goes through."""

    BLOCK_M: int
    num_warps: int
    num_stages: int
    tiles: int


def tiling(rows: int, outs: int, ins: int, size: int, limits: DeviceLimits) -> Tiling:
    """The division of a product of activations of 16 bits, in tiles of `size` inputs.

    Chosen by measurement on an H200: up to four programs share the inputs of an output tile, which hides the time that numbers take to be
    unpacked. More rows leave more to do for each program.
    """
    block = block_m(rows)
    programs = (7 if rows <= 64 else 2) * limits.multiprocessors
    splits = min(max(programs // triton.cdiv(outs, BLOCK_N), 1), 4).bit_length() - 1
    stages = min(3, limits.shared_memory // (size * (2 * block + BLOCK_N)))
    # Warps of other devices keep more of their operands in registers.
    warps = 4 if block <= 64 or limits.capability[0] == HOPPER else 8
    return Tiling(block, warps, stages, triton.cdiv(triton.cdiv(ins, size), 1 << splits))
