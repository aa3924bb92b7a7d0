"""Computes log-probabilities of tokens and of the most likely tokens on the GPU."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.sampling.order import number_of, pair, token_of

BLOCK = 4096
"""Tokens per program."""
MAX_COUNT = 20
"""The most likely tokens that a line may have, as in the API. All lines use the same compiled kernel, whatever their count."""

_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Less than any pair."""


# Without this, Triton would compile variants for a count of 1 and for multiples of 16 when a request first uses such a count.
@triton.jit(do_not_specialize=["count"])
def _part_kernel(
    best_ptr, total_ptr, likelier_ptr, likeliest_ptr, logits_ptr, places_ptr, tokens_ptr, stride, vocabulary, count, block: tl.constexpr
):
    # One program computes, for one block of one row, its best logit, the sum of exponentials relative to it, how many tokens are more
    # likely than the chosen one, and the `count` most likely tokens.
    line, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = line * tl.num_programs(1) + part
    place = tl.load(places_ptr + line)
    logits_ptr += place * stride
    own = tl.load(logits_ptr + tl.maximum(tl.load(tokens_ptr + place), 0))
    tokens = part * block + tl.arange(0, block)
    inside = tokens < vocabulary
    x = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf"))
    best = tl.max(x, 0)
    tl.store(best_ptr + at, best)
    # If the best logit is -inf, the sum is 0.
    total = tl.sum(tl.where(x > float("-inf"), tl.exp(x - best), 0.0), 0)
    tl.store(total_ptr + at, total)
    tl.store(likelier_ptr + at, tl.sum((x > own).to(tl.int32), 0))
    left = tl.where(inside, pair(x, tokens), _NONE)
    for nth in range(count):
        likeliest = tl.max(left, 0)
        tl.store(likeliest_ptr + at * count + nth, likeliest)
        left = tl.where(left == likeliest, _NONE, left)


@triton.jit(do_not_specialize=["count"])
def _line_kernel(
    lines_ptr,
    best_ptr,
    total_ptr,
    likelier_ptr,
    likeliest_ptr,
    logits_ptr,
    places_ptr,
    tokens_ptr,
    stride,
    parts,
    count,
    width: tl.constexpr,
    candidates: tl.constexpr,
):
    # One program combines the parts of one row.
    line = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + line)
    offsets = tl.arange(0, width)
    inside = offsets < parts
    bests = tl.load(best_ptr + line * parts + offsets, mask=inside, other=float("-inf"))
    totals = tl.load(total_ptr + line * parts + offsets, mask=inside, other=0.0)
    best = tl.max(bests, 0)
    total = tl.log(tl.sum(totals * tl.exp(bests - best), 0))
    token = tl.maximum(tl.load(tokens_ptr + place), 0)
    own = tl.load(logits_ptr + place * stride + token) - best - total
    likelier = tl.sum(tl.load(likelier_ptr + line * parts + offsets, mask=inside, other=0), 0)
    lines_ptr += line * (3 + 2 * count)
    tl.store(lines_ptr, token)
    tl.store(lines_ptr + 1, own.to(tl.int32, bitcast=True))
    tl.store(lines_ptr + 2, likelier + 1)
    ranks = tl.arange(0, candidates)
    left = tl.load(likeliest_ptr + line * parts * count + ranks, mask=ranks < parts * count, other=_NONE)
    for nth in range(count):
        likeliest = tl.max(left, 0)
        tl.store(lines_ptr + 3 + nth, token_of(likeliest))
        tl.store(lines_ptr + 3 + count + nth, (number_of(likeliest) - best - total).to(tl.int32, bitcast=True))
        left = tl.where(left == likeliest, _NONE, left)


def score(logits: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Returns lines for the rows `places` [M] of logits [N, vocabulary], for the tokens at these places of `tokens`, int32 [N].

    int32 [M, 3 + 2 * count]: the token (0 for -1), its log-probability, its rank (1 is the most likely), the `count` most likely tokens,
    best first and ties by id, and their log-probabilities. Log-probabilities are the bits of an fp32. `count` is at most MAX_COUNT.
    """
    lines, (_, vocabulary), device = len(places), logits.shape, logits.device
    parts = triton.cdiv(vocabulary, BLOCK)
    places, tokens = places.contiguous(), tokens.contiguous()
    # Parts of one tensor would be aligned differently for other numbers of lines, for which Triton compiles other kernels.
    best, total = torch.empty(lines, parts, device=device), torch.empty(lines, parts, device=device)
    likelier = torch.empty(lines, parts, dtype=torch.int32, device=device)
    likeliest = torch.empty(lines, parts, count, dtype=torch.int64, device=device)
    found = torch.empty(lines, 3 + 2 * count, dtype=torch.int32, device=device)
    pieces = best, total, likelier, likeliest, logits, places, tokens, logits.stride(0)
    _part_kernel[(lines, parts)](*pieces, vocabulary, count, block=BLOCK, num_warps=8)
    width, candidates = triton.next_power_of_2(parts), triton.next_power_of_2(parts * MAX_COUNT)
    _line_kernel[(lines,)](found, *pieces, parts, count, width=width, candidates=candidates, num_warps=4)
    return found
