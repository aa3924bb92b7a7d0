"""Finds the logit threshold of top-k, top-p and min-p on the GPU, by a radix select without sorting."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment,operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.sampling.order import ordered
from chairlift.kernels.sampling.reference import MASS
from chairlift.kernels.sampling.settings import Settings

BLOCK, BLOCKS = 4096, 4
"""Tokens per iteration of a program, and its number of iterations."""

_MASS = tl.constexpr(MASS)
# The bits of a logit, mapped to sort in its order, are three digits of 11, 11 and 10 bits. Levels 0 to 2 find those of the least likely
# token that top-k selects, levels 3 to 5 those of the least likely of these that top-p selects.
_LEVELS = tl.constexpr(6)
_VALUES = tl.constexpr(2048)
# State of a row before each level and after the last: the known digits and the remaining count or mass. Before level 3 it is top-k's
# result.
_STATE = tl.constexpr(2 * 7)
_FLOOR = tl.constexpr(2 * 3)


@triton.jit
def _narrow(state_ptr, sums_ptr, level: tl.constexpr, top_k, top_p):
    """Returns the digits known after a level, as one number, and the remaining count or mass among logits that begin with them.

    The search is for the largest logit that, with all logits above it, is enough: enough tokens for top-k, enough probability for top-p.
    Its next digit is the largest that satisfies this.
    """
    values = tl.arange(0, _VALUES)
    sums = tl.load(sums_ptr + level * _VALUES + values)
    if level == 0:
        known, wanted = tl.zeros((), tl.int64), top_k.to(tl.int64)
    elif level == 3:
        share = tl.ceil(top_p.to(tl.float64) * tl.sum(sums, 0).to(tl.float64))
        known, wanted = tl.zeros((), tl.int64), tl.maximum(share.to(tl.int64), 1)
    else:
        known, wanted = tl.load(state_ptr + 2 * level), tl.load(state_ptr + 2 * level + 1)
    enough = tl.cumsum(sums, 0, reverse=True) >= wanted
    digit = tl.sum(enough.to(tl.int32), 0) - 1
    above = tl.sum(tl.where(values > digit, sums, 0), 0)
    bits: tl.constexpr = 10 if level % 3 == 2 else 11
    return (known << bits) | digit, wanted - above


@triton.jit
def _sum_kernel(
    maxima_ptr,
    sums_ptr,
    state_ptr,
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    stride,
    vocabulary,
    level: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
    width: tl.constexpr,
):
    # One program sums, for some blocks of one row, the number of tokens or the probability for each value of the level's digit, among
    # logits that begin with the known digits. Integer sums do not depend on the order. The first level also finds the best logits.
    place, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows_ptr + place)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    counted = (temperature > 0) & (top_k > 0) & (top_k < vocabulary)
    weighed = (temperature > 0) & (top_p < 1)
    logits_ptr += place * stride
    maxima_ptr += place * parts
    sums_ptr += place * _LEVELS * _VALUES
    state_ptr += place * _STATE
    known, wanted, floor = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if level > 0:
        begun = counted if level <= 3 else weighed
        if begun:
            known, wanted = _narrow(state_ptr, sums_ptr, level - 1, top_k, top_p)
        if part == 0:
            tl.store(state_ptr + 2 * level, known)
            tl.store(state_ptr + 2 * level + 1, wanted)
    if level == 3:
        floor = known
    elif level > 3:
        floor = tl.load(state_ptr + _FLOOR)
    concerned = weighed
    if level == 0:
        concerned = temperature > 0
    elif level < 3:
        concerned = counted
    if concerned:
        best = 0.0
        if level >= 3:
            offsets = tl.arange(0, width)
            best = tl.max(tl.load(maxima_ptr + offsets, mask=offsets < parts, other=float("-inf")), 0)
        highest = tl.full((block,), float("-inf"), tl.float32)
        # Together, the tokens that are less likely than this part of the best have less than half of what top-p leaves out. They are
        # never selected, so the first digit need not tell them apart: most tokens of most rows, which are in few values.
        likely, rest = (1 - top_p) / (2 * vocabulary), tl.zeros((), tl.int64)
        counts = tl.zeros((_VALUES,), tl.int32)
        digit: tl.constexpr = level % 3
        shift: tl.constexpr = 21 if digit == 0 else (10 if digit == 1 else 0)
        bits: tl.constexpr = 10 if digit == 2 else 11
        for step in range(blocks):
            tokens = (part * blocks + step) * block + tl.arange(0, block)
            inside = tokens < vocabulary
            x = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf"))
            order = ordered(x).to(tl.uint32, bitcast=True) ^ 0x80000000
            if digit > 0:
                inside = inside & ((order >> shift >> bits) == known.to(tl.uint32))
            value = ((order >> shift) & ((1 << bits) - 1)).to(tl.int32)
            sum_ptr = sums_ptr + level * _VALUES + value
            if level == 0:
                highest = tl.maximum(highest, x)
            if level < 3:
                if counted and level == 0:
                    counts += tl.histogram(value, _VALUES, mask=inside)
                elif counted:
                    tl.atomic_add(sum_ptr, tl.full((block,), 1, tl.int64), mask=inside, sem="relaxed")
            else:
                weight = tl.where(x > float("-inf"), tl.exp((x - best) / temperature), 0.0)
                mass = (weight * _MASS).to(tl.int64)
                inside = inside & (mass > 0) & (order >= floor.to(tl.uint32))
                if level == 3:
                    rest += tl.sum(tl.where(inside & (weight < likely), mass, 0), 0)
                tl.atomic_add(sum_ptr, mass, mask=inside & (weight >= likely), sem="relaxed")
        if level == 0:
            tl.store(maxima_ptr + part, tl.max(highest, 0))
            if counted:
                tl.atomic_add(sums_ptr + tl.arange(0, _VALUES), counts.to(tl.int64), mask=counts > 0, sem="relaxed")
        elif level == 3:
            tl.atomic_add(sums_ptr + level * _VALUES, rest, sem="relaxed")


@triton.jit
def _least_kernel(
    least_ptr,
    maxima_ptr,
    sums_ptr,
    state_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    parts,
    width: tl.constexpr,
):
    # One program combines one row's top-k, top-p and min-p.
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    state_ptr += place * _STATE
    known = tl.load(state_ptr + _FLOOR)
    if (temperature > 0) & (top_p < 1):
        known, _ = _narrow(state_ptr, sums_ptr + place * _LEVELS * _VALUES, 5, top_k, top_p)
    least = (known.to(tl.uint32) ^ 0x80000000).to(tl.int32, bitcast=True)
    if (temperature > 0) & (min_p > 0):
        offsets = tl.arange(0, width)
        best = tl.max(tl.load(maxima_ptr + place * parts + offsets, mask=offsets < parts, other=float("-inf")), 0)
        least = tl.maximum(least, ordered(best + temperature * tl.log(min_p)))
    tl.store(least_ptr + place, least)


def thresholds(logits: torch.Tensor, rows: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Returns the `ordered` logit that a token must reach to be drawn, int32 [N], for logits [N, vocabulary] and rows [N].

    See `reference.thresholds`. This is a radix select: each level sums over the values of one digit, and its programs first evaluate the
    previous level's sums. Each level is a separate launch, because programs cannot wait for one another.
    """
    count, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, BLOCK * BLOCKS)
    device, width = logits.device, triton.next_power_of_2(parts)
    levels = _LEVELS.value
    maxima = torch.empty(count, parts, device=device)
    sums = torch.zeros(count, levels, _VALUES.value, dtype=torch.int64, device=device)
    state = torch.empty(count, _STATE.value, dtype=torch.int64, device=device)
    least = torch.empty(count, dtype=torch.int32, device=device)
    columns = settings.temperature, settings.top_k, settings.top_p
    scratch, size = (maxima, sums, state), (logits.stride(0), vocabulary)
    for level in range(levels):
        _sum_kernel[(count, parts)](
            *scratch, logits, rows, *columns, *size, level=level, block=BLOCK, blocks=BLOCKS, width=width, num_warps=8
        )
    _least_kernel[(count,)](least, *scratch, rows, *columns, settings.min_p, parts, width=width, num_warps=8)
    return least
