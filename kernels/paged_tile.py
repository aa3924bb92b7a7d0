"""What decode and prefill attention share: a tile of a cache's keys and values, and the softmax that goes on from tile to tile.

Scores are kept in base 2, which is what the hardware's exponential takes. The reference in torch is `chairlift.layers.attention`'s,
which CPUs use.
"""

# Triton has no types: mypy checks the launchers alone.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    cells_ptr, blocks, cells, seen, block_stride: tl.constexpr, cell_stride: tl.constexpr, dim: tl.constexpr, masked: tl.constexpr
):
    """Keys or values [tile, dim] of some cells of some blocks, zero where not `seen`.

    Strides are constants: of those that are no multiples of 16 the compiler could not tell that a load of 16 bytes is aligned.
    """
    padded: tl.constexpr = triton.next_power_of_2(dim)
    dims = tl.arange(0, padded)
    at = cells_ptr + (blocks.to(tl.int64) * block_stride + cells * cell_stride)[:, None] + dims[None, :]
    # What nobody wrote may be NaN, and zero times NaN is not zero.
    if masked and padded != dim:
        return tl.load(at, mask=seen[:, None] & (dims < dim)[None, :], other=0.0)
    elif masked:
        return tl.load(at, mask=seen[:, None], other=0.0)
    elif padded != dim:
        return tl.load(at, mask=(dims < dim)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def score_tile(query, keys, factor, cap, capped: tl.constexpr):
    """Products of queries and keys, times `factor`; then, with a `cap` c, c * tanh."""
    # fp32 is not to be rounded to tf32; halves do not ask.
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * factor
    if capped:
        # tanh(x) = 2 sigmoid(2x) - 1: the quotient of exponentials would overflow.
        scores = cap * (2 * tl.sigmoid(scores) - 1)
    return scores


@triton.jit
def add_tile(scores, values, top, total, mixed):
    """The largest score, the sum of weights and the weighted sum of values of each row, with another tile in them."""
    # A row that sees nothing yet has minus infinity for its largest score, and no difference of two such is a number.
    new_top = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - finite[:, None])
    kept = tl.exp2(top - finite)
    mixed = mixed * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_top, total * kept + tl.sum(weights, 1), mixed


@triton.jit
def add_sink(sink, top, total, mixed):
    """The sum of weights and the weighted sum of values with a key in them that every query sees, and that has no value."""
    new_top = tl.maximum(top, sink)
    kept = tl.exp2(top - new_top)
    return total * kept + tl.exp2(sink - new_top), mixed * kept[:, None]


class Step(NamedTuple):
    """What the kernels read of a step, int32: sequence i's blocks are in row rows[i] of `tables`; the rest as in the step buffers."""

    tables: torch.Tensor
    rows: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor


class Scoring(NamedTuple):
    """How a layer's scores are made: see `chairlift.layers.attention.paged_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    scales: tuple[torch.Tensor, torch.Tensor] | None = None


def score_factors(scoring: Scoring) -> tuple[float, float]:
    """What products are multiplied by before `score_tile` caps them, and the cap, in base 2."""
    cap = scoring.softcap
    return (2 * scoring.scale / cap, cap * LOG2E.value) if cap else (scoring.scale * LOG2E.value, 0.0)


def tile_keys(keys: torch.Tensor) -> int:
    """Keys in a tile: as many as leave room in shared memory for several tiles."""
    row = triton.next_power_of_2(keys.shape[-1]) * keys.element_size()
    return int(min(max(16384 // row, 16), 64))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many there are; one where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
