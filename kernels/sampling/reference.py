"""References of the sampling kernels in torch: for tests, and for tensors on a CPU."""

from __future__ import annotations

import torch

from chairlift.kernels.sampling.settings import Settings

FAILED = -1
"""The token of a row with a NaN logit or whose best logit is not finite."""
LOWEST = torch.iinfo(torch.int32).min
"""Less than `ordered` of any number."""
MASS = 2.0**40
"""A weight of 1 in fixed point. The sum of a vocabulary's weights stays below 2^63."""

_WORD = 0xFFFFFFFF


def philox(key: tuple[torch.Tensor, ...], counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 (Salmon et al., 2011): four random words from a key of two words and a counter of four, all int64 below 2^32."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        # The products overflow in int64, which does not change their lower 64 bits.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32 & _WORD) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32 & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def words(seed: torch.Tensor, position: torch.Tensor, count: int) -> torch.Tensor:
    """Returns random words [N, count] (int64 below 2^32) for int64 seeds [N] and non-negative positions [N]; word i is for token i.

    The seed is the key. The counter holds i // 4 and the position, and gives the words of four tokens.
    """
    seed, position = seed.unsqueeze(1), position.long().unsqueeze(1)
    group = torch.arange(-(-count // 4), device=seed.device)
    zero = torch.zeros_like(group)
    return torch.stack(philox((seed & _WORD, seed >> 32 & _WORD), (group, zero, position, zero)), -1).flatten(1)[:, :count]


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Returns Gumbel noise in fp32: -log(-log(1 - v)) for v = bits / 2^32, with high resolution near 0, which unlikely tokens need.

    The inner logarithm is exact there too: log(1 - v) = log(w) * v / (1 - w), where w is 1 - v rounded (Kahan).
    """
    v = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    w = 1 - v
    waiting = torch.where(w == 1, v, -w.log() * (v / (1 - w)))
    return -waiting.log()


def ordered(x: torch.Tensor) -> torch.Tensor:
    """Returns integers in the order of fp32 numbers. Both zeros are equal."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def thresholds(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Returns the `ordered` logit that a token must reach to be drawn, int32 [N], by sorting logits [N, vocabulary]; settings are [N].

    Tokens as likely as the last selected token are also selected. Temperature 0 excludes no token.
    """
    vocabulary = logits.shape[1]
    values = logits.sort(descending=True).values
    order, best = ordered(values), values[:, :1]
    cut, top_k = ((top_k > 0) & (top_k < vocabulary)).unsqueeze(1), top_k.clamp(1, vocabulary).long().unsqueeze(1)
    least = torch.where(cut, order.gather(1, top_k - 1), LOWEST)
    weights = (((values - best) / temperature.unsqueeze(1)).exp() * MASS).nan_to_num(0).long()
    weights = torch.where(order >= least, weights, 0)
    wanted = (top_p.double() * weights.sum(1)).ceil().long().clamp(min=1).unsqueeze(1)
    enough = (weights.cumsum(1) < wanted).sum(1, keepdim=True).clamp(max=vocabulary - 1)
    nucleus = torch.where(top_p.unsqueeze(1) < 1, order.gather(1, enough), least)
    floor = torch.where(min_p > 0, ordered(best.squeeze(1) + temperature * min_p.log()), LOWEST)
    found = torch.maximum(torch.maximum(least, nucleus).squeeze(1), floor)
    return torch.where(temperature > 0, found, LOWEST)


def penalise(logits: torch.Tensor, rows: torch.Tensor, settings: Settings, said: torch.Tensor) -> None:
    """Penalises the logits [N, vocabulary] of the rows [N] that have penalties.

    `said`, int32 [slots, vocabulary], has for each token twice its number of occurrences in the output, plus 1 if the prompt contains it.
    """
    slot = settings.slot[rows].unsqueeze(1)
    mine = torch.where(slot >= 0, said[slot.squeeze(1).clamp(min=0).long()], 0)
    repetition, presence, frequency = (values[rows].unsqueeze(1) for values in (settings.repetition, settings.presence, settings.frequency))
    count = mine >> 1
    found = torch.where(logits > 0, logits / repetition, logits * repetition) - count * frequency - (count > 0) * presence
    logits.copy_(torch.where(mine > 0, found, logits))


def draw(logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, settings: Settings, least: torch.Tensor | None) -> torch.Tensor:
    """Draws a token for each row of logits [N, vocabulary], int32 [N]: the first with the largest logit / temperature + noise.

    Only tokens whose `ordered` logit is at least `least` [N] can be drawn. Temperature 0 takes the first of the most likely tokens.
    """
    temperature = settings.temperature[rows].unsqueeze(1)
    noise = gumbel(words(settings.seed[rows], positions, logits.shape[1]))
    scores = torch.where(temperature > 0, logits / temperature + noise, logits)
    if least is not None:
        scores = scores.masked_fill(ordered(logits) < least.unsqueeze(1), float("-inf"))
    # `max` treats NaN as the largest number.
    best, token = torch.where(logits == float("inf"), logits, scores.where(~logits.isnan(), logits)).max(1)
    return token.int().masked_fill(~best.isfinite(), FAILED)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    settings: Settings,
    last_token: torch.Tensor,
    said: torch.Tensor | None,
    *,
    truncated: bool,
) -> torch.Tensor:
    """Reference of `sample.sample`."""
    if said is not None:
        penalise(logits, rows, settings, said)
    least = None
    if truncated:
        least = thresholds(logits, *(values[rows] for values in (settings.temperature, settings.top_k, settings.top_p, settings.min_p)))
    tokens = draw(logits, rows, positions, settings, least)
    last_token[rows] = tokens.clamp(min=0)
    if said is not None:
        counted = (settings.slot[rows] >= 0) & (tokens >= 0)
        said.index_put_((settings.slot[rows].clamp(min=0).long(), tokens.clamp(min=0).long()), counted.int() * 2, accumulate=True)
    return tokens


def score(logits: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Reference of `logprobs.score`."""
    logits, own = logits[places], tokens[places].clamp(min=0).long().unsqueeze(1)
    logprobs, likeliest = logits.log_softmax(1), logits.sort(descending=True, stable=True).indices[:, :count]
    rank = (logits > logits.gather(1, own)).sum(1, keepdim=True, dtype=torch.int32) + 1
    numbers = logprobs.gather(1, torch.cat((own, likeliest), 1)).view(torch.int32)
    return torch.cat((own.int(), numbers[:, :1], rank, likeliest.int(), numbers[:, 1:]), 1)
