"""Multiplies the rows of each expert of a mixture by its weight, quantised or not, in one launch on the GPU."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.launch_settings import HOPPER, DeviceLimits, LaunchSettings, device_limits
from chairlift.kernels.weight_tile import as_bytes, load_halves, load_mxfp4, load_pairs, load_weight

FEW, MANY = 64, 256
"""Rows of an expert, on average: below FEW, reading its weight takes longer than multiplying; from MANY on, tiles of 256 are full."""


Weight = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]
"""Numbers, scales, zeros and group of all experts, as `chairlift.layers.linear.Quantised` has those of one, with a leading axis.

Numbers without scales are not quantised. Scales in uint8 are exponents of MXFP4, whose numbers are pairs of 4 bits.
"""


@jit(do_not_specialize=["used"])
def _expert_linear_kernel(
    out_ptr,
    x_ptr,
    numbers_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    order_ptr,
    ends_ptr,
    used,
    experts,
    outs,
    ins,
    pitch,
    groups,
    SPREAD: tl.constexpr,
    MXFP4: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Each expert's rows are some tiles of BLOCK_M. The grid has as many tiles as there may be.
    each = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + each, mask=each < experts, other=0)
    starts = tl.load(ends_ptr + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    if tile >= tl.max(last, 0):
        return
    expert = tl.sum(((last <= tile) & (each < experts)).to(tl.int32), 0)
    own = each == expert
    first = tl.sum(tl.where(own, starts + (tile - last + tiles) * BLOCK_M, 0), 0)
    places = first + tl.arange(0, BLOCK_M)
    known_m = places < tl.sum(tl.where(own, ends, 0), 0)
    choices = tl.load(order_ptr + places, mask=known_m, other=0)
    inputs = x_ptr + (choices // used if SPREAD else places).to(tl.int64)[None, :] * ins
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known_n = offs_n < outs
    numbers_ptr += expert.to(tl.int64) * outs * pitch
    if scale_ptr is not None:
        scale_ptr += expert.to(tl.int64) * outs * groups
    if zero_ptr is not None:
        zero_ptr += expert.to(tl.int64) * outs * groups
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, ins, BLOCK_K):
        # A product takes at least 16 columns at once.
        if MXFP4 or (zero_ptr is not None and BLOCK_K >= 32):
            even, odd = load_pairs(inputs, known_m, start, ins, BLOCK_K)
            if MXFP4:
                low, high = load_mxfp4(numbers_ptr, scale_ptr, offs_n, start, outs, pitch, groups, BLOCK_K, even.dtype)
                acc = tl.dot(high, odd, tl.dot(low, even, acc))
            else:
                group = start // GROUP if GROUP else 0
                low, high = load_halves(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K, even.dtype)
                product = tl.dot(high, odd, tl.dot(low, even))
                acc += product * tl.load(scale_ptr + offs_n * groups + group, mask=known_n, other=0.0).to(tl.float32)[:, None]
        else:
            columns = start + tl.arange(0, BLOCK_K)
            x = tl.load(inputs + columns[:, None], mask=known_m[None, :] & (columns < ins)[:, None], other=0.0)
            if scale_ptr is None:
                known = known_n[:, None] & (columns < ins)[None, :]
                weight = tl.load(numbers_ptr + offs_n.to(tl.int64)[:, None] * ins + columns[None, :], mask=known, other=0.0)
                acc = tl.dot(weight, x, acc)
            else:
                group = start // GROUP if GROUP else 0
                weight = load_weight(numbers_ptr, zero_ptr, offs_n, start, group, outs, pitch, groups, BLOCK_K, x.dtype)
                if GROUP:
                    product = tl.dot(weight, x)
                    acc += product * tl.load(scale_ptr + offs_n * groups + group, mask=known_n, other=0.0).to(tl.float32)[:, None]
                else:
                    acc = tl.dot(weight, x, acc)
    if scale_ptr is not None and not MXFP4 and not GROUP and zero_ptr is None:
        acc *= tl.load(scale_ptr + offs_n * groups, mask=known_n, other=0.0).to(tl.float32)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * outs + offs_n, mask=known_n, other=0.0).to(tl.float32)[:, None]
    rows = (places if SPREAD else choices).to(tl.int64)
    tl.store(out_ptr + rows[None, :] * outs + offs_n[:, None], acc.to(out_ptr.dtype.element_ty), mask=known_n[:, None] & known_m[None, :])


def expert_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, rows: tuple[torch.Tensor, torch.Tensor], used: int, *, spread: bool
) -> torch.Tensor:
    """Multiplies contiguous rows of 16 bits by the transposed weights [experts, out, in] of their experts, and adds biases [experts, out].

    `rows` are the order and the ends of `sort_experts`, for tokens that use `used` experts each. With `spread` x is [tokens, in], and the
    result [tokens * used, out] is sorted; without, x [tokens * used, in] is sorted, and the result is in the order of the choices.
    """
    (numbers, scale, zero, group), (order, ends) = weight, rows
    count, outs, pitch = numbers.shape
    choices, ins = len(order), x.shape[1]
    out = x.new_empty(choices, outs)
    mxfp4 = scale is not None and scale.dtype == torch.uint8
    grouped = zero is not None or (group > 0 and not mxfp4)
    settings, size = expert_settings(choices, count, scale is not None, grouped, device_limits(x.device))
    size = min(group, size) if group and not mxfp4 else size
    grid = (triton.cdiv(outs, settings.BLOCK_N), min(choices, count) + choices // settings.BLOCK_M)
    _expert_linear_kernel[grid](
        out,
        x,
        as_bytes(numbers),
        scale,
        zero,
        bias,
        order,
        ends,
        used,
        count,
        outs,
        ins,
        pitch,
        0 if scale is None else scale.shape[2],
        SPREAD=spread,
        MXFP4=mxfp4,
        GROUP=group,
        EXPERTS=triton.next_power_of_2(count),
        BLOCK_K=size,
        **settings._asdict(),
    )
    return out


def torch_is_faster(x: torch.Tensor, rows: int, experts: int) -> bool:
    """Whether torch multiplies so many rows x by matrices that are not quantised faster, and without waiting for the device.

    Its `_grouped_mm` has a kernel for bfloat16 on sm_90. Elsewhere it copies the numbers of rows to the host, which no graph can capture,
    or raises an error (torch 2.8).
    """
    return x.dtype == torch.bfloat16 and rows >= FEW * experts and device_limits(x.device).capability[0] == HOPPER


def expert_settings(choices: int, experts: int, quantised: bool, grouped: bool, limits: DeviceLimits) -> tuple[LaunchSettings, int]:
    """Settings for so many choices of experts, and BLOCK_K. With `grouped` a program has sums of a group of inputs beside those of all.

    Chosen by measurement on an H200, for the rows that an expert has on average. What is unpacked is used for as many rows as possible.
    """
    mean, hopper = choices // experts, limits.capability[0] == HOPPER
    if mean >= FEW:
        block, block_n, warps, stages, block_k = (256 if mean >= MANY and hopper and not grouped else 128), 128, 8, 3, 64
    elif mean >= 32 and quantised and hopper:
        block, block_n, warps, stages, block_k = 64, 64, 4, 3, 64
    elif mean >= 16:
        block, block_n, warps, stages, block_k = 32, (128 if quantised and hopper else 64), 4, (3 if quantised else 4), 128
    else:
        block, block_n, warps, stages, block_k = 16, 64, 4, (3 if quantised else 4), 128
    most = limits.shared_memory // (2 * (block + block_n) * block_k)
    return LaunchSettings(block, block_n, warps, min(stages, most)), block_k
