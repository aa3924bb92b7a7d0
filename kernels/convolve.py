"""Causal convolutions over the last tokens of each sequence on the GPU, with the inputs of earlier steps in slots."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,misc"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from chairlift.kernels.cached_launch import jit

if TYPE_CHECKING:
    from chairlift.layers.recurrent import Convolution, StateStep

TOKENS, CHANNELS = 8, 128
"""Tokens and channels of a program: 8 channels for each lane of its 4 warps, which are 16 bytes in half precision."""


@triton.jit
def _input(x_ptr, token, channel, mask, pitch, first, channels, gated: tl.constexpr):
    """The inputs of the convolution."""
    address = x_ptr + token.to(tl.int64) * pitch + first + channel
    x = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    if gated:
        x *= tl.load(address - 2 * channels, mask=mask, other=0.0).to(tl.float32)
    return x


@jit(do_not_specialize=["tokens"])
def _convolve_kernel(
    out_ptr,
    x_ptr,
    columns_ptr,
    taps_ptr,
    bias_ptr,
    starts_ptr,
    positions_ptr,
    rows_ptr,
    writes_ptr,
    write_starts_ptr,
    tokens,
    channels,
    pitch,
    first,
    slot_stride,
    taps: tl.constexpr,
    gated: tl.constexpr,
    token_block: tl.constexpr,
    channel_block: tl.constexpr,
):
    # A program computes neighbours of any sequences. Nothing that it reads is written by another one.
    token = tl.program_id(0) * token_block + tl.arange(0, token_block)
    known = token < tokens
    sequence = tl.load(rows_ptr + token, mask=known, other=0)
    start = tl.load(starts_ptr + sequence, mask=known, other=0)
    last = tl.load(write_starts_ptr + sequence + 1, mask=known, other=0)
    known = known & (tl.load(write_starts_ptr + sequence, mask=known, other=0) < last)
    slot = tl.load(writes_ptr + 2 * last - 1, mask=known, other=0).to(tl.int64)
    resumes = known & (tl.load(positions_ptr + start, mask=known, other=0) > 0)
    channel = (tl.program_id(1) * channel_block + tl.arange(0, channel_block))[None, :]
    inside = channel < channels
    sums = tl.zeros((token_block, channel_block), dtype=tl.float32)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + channel, mask=inside, other=0.0)
    for tap in tl.static_range(taps):
        source = token - (taps - 1 - tap)
        here = (known & (source >= start))[:, None] & inside
        x = _input(x_ptr, source[:, None], channel, here, pitch, first, channels, gated)
        if tap < taps - 1:
            # Inputs before this step.
            column = taps - 1 + source - start
            before = (resumes & (source < start) & (column >= 0))[:, None] & inside
            x += tl.load(columns_ptr + (slot * slot_stride + column * channels)[:, None] + channel, mask=before, other=0.0)
        sums += x * tl.load(taps_ptr + tap * channels + channel, mask=inside, other=0.0)
    mask = (token < tokens)[:, None] & inside
    if gated:
        address = x_ptr + token[:, None].to(tl.int64) * pitch + first - channels + channel
        sums *= tl.load(address, mask=mask, other=0.0).to(tl.float32)
    else:
        sums *= tl.sigmoid(sums)
    tl.store(out_ptr + token[:, None].to(tl.int64) * channels + channel, sums.to(out_ptr.dtype.element_ty), mask=mask)


@jit()
def _move_columns_kernel(
    columns_ptr,
    x_ptr,
    starts_ptr,
    positions_ptr,
    writes_ptr,
    write_starts_ptr,
    channels,
    pitch,
    first,
    slot_stride,
    taps: tl.constexpr,
    gated: tl.constexpr,
    column_block: tl.constexpr,
    channel_block: tl.constexpr,
):
    # A program writes some channels of all states of a sequence.
    sequence = tl.program_id(0)
    write, last = tl.load(write_starts_ptr + sequence), tl.load(write_starts_ptr + sequence + 1)
    if write < last:
        start = tl.load(starts_ptr + sequence)
        own = tl.load(writes_ptr + 2 * last - 1).to(tl.int64)
        resumes = tl.load(positions_ptr + start) > 0
        channel = (tl.program_id(1) * channel_block + tl.arange(0, channel_block))[None, :]
        column = tl.arange(0, column_block)[:, None]
        mask = (column < taps - 1) & (channel < channels)
        for at in range(write, last):
            count, target = tl.load(writes_ptr + 2 * at), tl.load(writes_ptr + 2 * at + 1).to(tl.int64)
            source = count - (taps - 1) + column
            x = _input(x_ptr, start + source, channel, mask & (source >= 0), pitch, first, channels, gated)
            earlier = columns_ptr + own * slot_stride + (taps - 1 + source) * channels + channel
            x += tl.where(resumes, tl.load(earlier, mask=mask & (source < 0), other=0.0), 0.0)
            # The last write is to the slot that other lanes may still read.
            tl.debug_barrier()
            tl.store(columns_ptr + target * slot_stride + column * channels + channel, x, mask=mask)


def convolve(projected: torch.Tensor, columns: torch.Tensor, layer: Convolution, step: StateStep) -> torch.Tensor:
    """Convolves channels of contiguous rows [T, any] and moves the last inputs `columns` on (see `Convolution` and `StateStep`)."""
    (taps, channels), tokens, pitch = layer.taps.shape, len(projected), projected.shape[1]
    out = projected.new_empty(tokens, channels)
    states = step.writes, step.write_starts
    sizes = channels, pitch, layer.first, columns.stride(0)
    grid = triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS)
    given = (out, projected, columns, layer.taps, layer.bias, step.query_starts, step.positions, step.rows, *states, tokens, *sizes)
    _convolve_kernel[grid](*given, taps=taps, gated=layer.gated, token_block=TOKENS, channel_block=CHANNELS, num_warps=4)
    moved = (columns, projected, step.query_starts, step.positions, *states, *sizes)
    _move_columns_kernel[(len(step.write_starts) - 1, grid[1])](
        *moved, taps=taps, gated=layer.gated, column_block=triton.next_power_of_2(taps - 1), channel_block=CHANNELS, num_warps=4
    )
    return out
