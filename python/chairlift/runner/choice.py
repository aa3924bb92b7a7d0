"""A token for each row of logits: the likeliest, or one drawn."""

from __future__ import annotations

import numpy as np
import torch

from chairlift import _core

CANDIDATES = (256, 4096)
"""How many of the likeliest tokens torch looks at first, and then for the rows that need more; a few need all, which is slow.

Of a 135M model's rows at temperature 1 and top-p 0.95, two thirds need the second round, and 3 in 100 the third.
"""
FAILED = -1
"""The answer for a row whose logits are not finite, or that may draw nothing."""


def choose(
    logits: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
    """A token for each row of logits [N, vocabulary] in fp32; int32 [N], FAILED where there is NaN or the best is not finite.

    Temperature 0 takes the first of the likeliest. Otherwise `top_k` (int64, 0: all) and of these `top_p` and `min_p` (fp64) leave
    some tokens, and `uniform`, fp64 in [0, 1), says where in their cumulative distribution, likeliest first, the token is.
    """
    if logits.is_cpu:
        settings = (temperature, top_k, top_p, min_p, uniform)
        return np.frombuffer(_core.choose(logits.contiguous().numpy(), *settings, threads=torch.get_num_threads()), dtype=np.int32).copy()
    return choose_in_torch(logits, temperature, top_k, top_p, min_p, uniform)


def choose_in_torch(
    logits: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, uniform: np.ndarray
) -> np.ndarray:
    """As `choose`, on whatever device the logits are; equally likely tokens come in any order."""
    # NaN is the largest of all to `max`, and of equals the first is taken.
    best, choice = logits.max(-1)
    chosen: np.ndarray = choice.cpu().numpy().astype(np.int32)
    drawn = np.flatnonzero(temperature > 0)
    if drawn.size:
        some = logits if drawn.size == len(logits) else logits[torch.from_numpy(drawn)]
        chosen[drawn] = _draw(some, *(values[drawn] for values in (temperature, top_k, top_p, min_p, uniform)))
    chosen[~torch.isfinite(best).cpu().numpy()] = FAILED
    return chosen


def _draw(
    logits: torch.Tensor,
    temperatures: np.ndarray,
    top_ks: np.ndarray,
    top_ps: np.ndarray,
    min_ps: np.ndarray,
    uniforms: np.ndarray,
) -> np.ndarray:
    """Draws for rows of which none is greedy; those with NaN get an arbitrary token."""
    vocabulary, device = logits.shape[1], logits.device

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device).unsqueeze(1)

    temperature, top_p, min_p, uniform = column(temperatures), column(top_ps), column(min_ps), column(uniforms)
    top_k = column(np.where(top_ks == 0, vocabulary, np.minimum(top_ks, vocabulary)))
    best = logits.max(-1, keepdim=True).values
    total = ((logits - best) / temperature.float()).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    chosen = top_k.new_empty(len(logits))
    # Each round decides the rows that it can, and leaves to the next the ones that may reach beyond its candidates.
    left = torch.arange(len(logits), device=device)
    for count in (*CANDIDATES, vocabulary):
        whole = len(left) == len(logits)
        values, tokens = (logits if whole else logits[left]).topk(min(count, vocabulary))
        weights = ((values - best[left]).double() / temperature[left]).exp_()
        place, known = _pick(weights, vocabulary, total[left], top_k[left], top_p[left], min_p[left], uniform[left])
        chosen[left] = tokens.gather(1, place).squeeze(1)
        left = left[~known.squeeze(1)]
        if not len(left):
            break
    return chosen.cpu().numpy().astype(np.int32)


def _pick(
    weights: torch.Tensor,
    vocabulary: int,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the drawn tokens among the K likeliest of each row, [N, 1], and whether those K were enough to know.

    `weights` [N, K] are their unnormalised probabilities, falling from 1; `total` is the weight of the whole vocabulary.
    top-p counts from what top-k leaves, min-p from the likeliest token.
    """
    count = weights.shape[1]
    cumulative = weights.cumsum(1)
    # The weight that top-k leaves. Between the candidates and the vocabulary it is not known, so those rows never are.
    within, unlimited = top_k <= count, top_k == vocabulary
    mass = torch.where(within, cumulative.gather(1, top_k.clamp(max=count) - 1), total)
    rank = torch.arange(count, device=weights.device)
    kept = (rank < top_k) & (cumulative - weights < top_p * mass) & (weights >= min_p)
    length = kept.sum(1, keepdim=True).clamp(min=1)
    # Where all candidates are kept, more tokens may be. Then only a draw from all there are can be told, if it falls among these.
    closed = within | (unlimited & (length < count))
    target = uniform * torch.where(closed, cumulative.gather(1, length - 1), total)
    place = (cumulative <= target).sum(1, keepdim=True)
    known = closed | (unlimited & (top_p == 1) & (min_p == 0) & (place < count))
    return place.minimum(length - 1), known
