"""Draws a token per row on the GPU: the largest logit / temperature + Gumbel noise."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.sampling.order import number_of, ordered, pair, token_of
from chairlift.kernels.sampling.settings import Settings

BLOCK = 2048
"""Tokens per program."""


@triton.jit
def words(seed, position, first, block: tl.constexpr):
    """Returns random words (uint32) for `block` tokens from `first`, a multiple of four, as in `reference.words`."""
    group = first // 4 + tl.arange(0, block // 4)
    zero = group * 0
    a, b, c, d = tl.philox(seed, group, zero, zero + position, zero)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def gumbel(bits):
    """Returns Gumbel noise for random words, as in `reference.gumbel`."""
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    w = 1.0 - v
    # Where w is 1 the quotient is NaN, and the logarithm is v.
    waiting = tl.where(w == 1.0, v, -tl.log(w) * (v / (1.0 - w)))
    return -tl.log(waiting)


@triton.jit
def _draw_kernel(
    best_ptr, logits_ptr, rows_ptr, positions_ptr, temperature_ptr, seed_ptr, least_ptr, stride, vocabulary, block: tl.constexpr
):
    # One program finds the best token of one block of one row. The result does not depend on the other rows. A greedy row takes a branch; a
    # row without truncation has a threshold that every token reaches.
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + place)
    temperature, least = tl.load(temperature_ptr + row), tl.load(least_ptr + place)
    tokens = part * block + tl.arange(0, block)
    x = tl.load(logits_ptr + place * stride + tokens, mask=tokens < vocabulary, other=float("-inf"))
    order = ordered(x)
    bad = (x != x) | (x == float("inf"))
    score = x
    if temperature > 0:
        score = tl.where(order >= least, x, float("-inf"))
        # Most blocks of a row with top-k or top-p contain no token that can be drawn.
        if tl.max(order, 0) >= least:
            noise = gumbel(words(tl.load(seed_ptr + row), tl.load(positions_ptr + place), part * block, block))
            score = score / temperature + noise
    best = tl.max(pair(tl.where(bad, float("inf"), score), tokens), 0)
    tl.store(best_ptr + place * tl.num_programs(1) + part, best)


@triton.jit
def _choose_kernel(
    tokens_ptr, last_token_ptr, said_ptr, best_ptr, rows_ptr, slot_ptr, vocabulary, parts, counts: tl.constexpr, width: tl.constexpr
):
    # One program completes the draw of one row and stores the token where the next step reads it.
    place = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, width)
    best = tl.max(tl.load(best_ptr + place * parts + offsets, mask=offsets < parts, other=-0x7FFFFFFFFFFFFFFF), 0)
    score, token = number_of(best), token_of(best)
    drawn = (score > float("-inf")) & (score < float("inf"))
    tl.store(tokens_ptr + place, tl.where(drawn, token, -1))
    row = tl.load(rows_ptr + place)
    tl.store(last_token_ptr + row, tl.where(drawn, token, 0))
    if counts:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        if drawn & (slot >= 0):
            tl.atomic_add(said_ptr + slot * vocabulary + token, 2, sem="relaxed")


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    settings: Settings,
    least: torch.Tensor,
    last_token: torch.Tensor,
    said: torch.Tensor | None,
) -> torch.Tensor:
    """Draws a token for each row of logits [N, vocabulary]: int32 [N], -1 if a logit is NaN or the best is not finite.

    Only tokens whose `ordered` logit is at least `least`, int32 [N], can be drawn. The tokens are also written to `last_token` (0 for -1)
    and, if `said` is given, counted there for rows with penalties. Temperature 0 takes the first of the largest logits.
    """
    count, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, BLOCK)
    best = torch.empty(count, parts, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int32, device=logits.device)
    stride = logits.stride(0)
    _draw_kernel[(count, parts)](
        best, logits, rows, positions, settings.temperature, settings.seed, least, stride, vocabulary, block=BLOCK, num_warps=4
    )
    width = triton.next_power_of_2(parts)
    counted = last_token if said is None else said
    _choose_kernel[(count,)](
        tokens, last_token, counted, best, rows, settings.slot, vocabulary, parts, counts=said is not None, width=width, num_warps=1
    )
    return tokens
