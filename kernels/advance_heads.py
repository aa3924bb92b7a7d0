"""The recurrence of heads with matrices as states on the GPU: gated delta rules and state spaces."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,misc"

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from chairlift.kernels.cached_launch import jit

if TYPE_CHECKING:
    from chairlift.layers.recurrent import Heads, StateStep

NUMBERS = 4096
"""Numbers of a state that a program keeps in registers: 32 for each lane of its 4 warps."""


@triton.jit
def _softplus(x):
    """ln(1 + e^x), which is x itself from 20 on, and e^x nearly where it is small."""
    power = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(power < 1e-3, power - 0.5 * power * power, tl.log(1.0 + power)))


@jit()
def _advance_heads_kernel(
    out_ptr,
    mixed_ptr,
    projected_ptr,
    matrices_ptr,
    rates_ptr,
    step_bias_ptr,
    skip_ptr,
    starts_ptr,
    positions_ptr,
    writes_ptr,
    write_starts_ptr,
    mixed_pitch,
    pitch,
    slot_stride,
    queries_at,
    keys_at,
    values_at,
    steps_at,
    betas_at,
    count: tl.constexpr,
    groups: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    tiled: tl.constexpr,
    least: tl.constexpr,
    most: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
):
    # A program computes some columns of a head's state, token by token, so the sums have the same bits however a prompt is split.
    sequence, head = tl.program_id(0), tl.program_id(1)
    write, last = tl.load(write_starts_ptr + sequence), tl.load(write_starts_ptr + sequence + 1)
    if write < last:
        start = tl.load(starts_ptr + sequence)
        own = tl.load(writes_ptr + 2 * last - 1).to(tl.int64)
        resumes = tl.load(positions_ptr + start) > 0
        key = tl.arange(0, key_block)
        value = tl.program_id(2) * value_block + tl.arange(0, value_block)
        is_key, is_value = key < key_size, value < value_size
        inside = is_key[:, None] & is_value[None, :]
        offsets = head * key_size * value_size + key[:, None] * value_size + value[None, :]
        state = tl.where(resumes, tl.load(matrices_ptr + own * slot_stride + offsets, mask=inside, other=0.0), 0.0)
        group = head % groups if tiled else head // (count // groups)
        rate, bias = tl.load(rates_ptr + head), tl.load(step_bias_ptr + head)
        # Only the first token of a chunk may be 31 bits away.
        first_mixed, first_row = mixed_ptr + start.to(tl.int64) * mixed_pitch, projected_ptr + start.to(tl.int64) * pitch
        first_out = out_ptr + start.to(tl.int64) * (count * value_size) + head * value_size + value
        for at in range(write, last):
            # Read, not carried from the turn before: Triton 3.6 takes what only an inner loop's bounds use for dead, and begins at 0.
            done = tl.load(writes_ptr + 2 * at - 2, mask=at > write, other=0)
            end = tl.load(writes_ptr + 2 * at)
            for token in range(done, end):
                mixed, row = first_mixed + token * mixed_pitch, first_row + token * pitch
                k = tl.load(mixed + keys_at + group * key_size + key, mask=is_key, other=0.0).to(tl.float32)
                q = tl.load(mixed + queries_at + group * key_size + key, mask=is_key, other=0.0).to(tl.float32)
                v = tl.load(mixed + values_at + head * value_size + value, mask=is_value, other=0.0).to(tl.float32)
                step = _softplus(tl.load(row + steps_at + head).to(tl.float32) + bias)
                if skip_ptr is None:
                    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * key_size**-0.5
                    state *= tl.exp(rate * step)
                    beta = tl.sigmoid(tl.load(row + betas_at + head).to(tl.float32))
                    state += k[:, None] * (beta * (v - tl.sum(state * k[:, None], 0)))[None, :]
                    out = tl.sum(state * q[:, None], 0)
                else:
                    step = tl.minimum(tl.maximum(step, least), most)
                    state = state * tl.exp(rate * step) + k[:, None] * (step * v)[None, :]
                    out = tl.sum(state * q[:, None], 0) + tl.load(skip_ptr + head) * v
                tl.store(first_out + token * (count * value_size), out.to(out_ptr.dtype.element_ty), mask=is_value)
            target = tl.load(writes_ptr + 2 * at + 1).to(tl.int64)
            tl.store(matrices_ptr + target * slot_stride + offsets, state, mask=inside)


def advance_heads(mixed: torch.Tensor, projected: torch.Tensor, matrices: torch.Tensor, heads: Heads, step: StateStep) -> torch.Tensor:
    """Computes the outputs [T, count * value size] of heads before their norm, and moves their states on (see `Heads` and `StateStep`).

    `mixed` and `projected` are contiguous rows.
    """
    out = mixed.new_empty(len(mixed), heads.count * heads.value_size)
    key_block, value_block = blocks(heads.key_size, heads.value_size)
    offsets = heads.offsets
    grid = len(step.write_starts) - 1, heads.count, triton.cdiv(heads.value_size, value_block)
    _advance_heads_kernel[grid](
        out,
        mixed,
        projected,
        matrices,
        heads.rates,
        heads.step_bias,
        heads.skip,
        step.query_starts,
        step.positions,
        step.writes,
        step.write_starts,
        mixed.shape[1],
        projected.shape[1],
        matrices.stride(0),
        offsets.queries,
        offsets.keys,
        offsets.values,
        offsets.steps,
        offsets.betas,
        count=heads.count,
        groups=heads.groups,
        key_size=heads.key_size,
        value_size=heads.value_size,
        tiled=heads.tiled,
        least=heads.limits[0],
        most=min(heads.limits[1], LARGEST_STEP),
        key_block=key_block,
        value_block=value_block,
        num_warps=4,
    )
    return out


LARGEST_STEP = math.ldexp(1.0, 127)
"""Stands for no limit of a step: Triton has no infinite constants."""


def blocks(key_size: int, value_size: int) -> tuple[int, int]:
    """The rows and columns of a state that a program keeps."""
    key_block = triton.next_power_of_2(key_size)
    return key_block, min(triton.next_power_of_2(value_size), max(NUMBERS // key_block, 1))
