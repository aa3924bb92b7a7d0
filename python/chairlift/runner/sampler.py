"""Chooses the next tokens from logits, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from chairlift.runner import bias, logprobs
from chairlift.runner.bias import Bias
from chairlift.runner.matcher import Matcher, accept, mask
from chairlift.runner.penalties import Penalties
from chairlift.runner.philox import uniforms
from chairlift.sampling import SamplingParams

CANDIDATES = (256, 4096)
"""How many of the likeliest tokens are looked at first, and then for the rows that need more; a few need all, which is slow.

Measured for a vocabulary of 49152, per row: 0.2, 0.7 and 4 ms. Of a 135M model's rows at temperature 1 and top-p 0.95, two thirds
need the second round, and 3 in 100 the third.
"""
LOWEST_TEMPERATURE = 1e-5
"""Below this all weight is on the likeliest token anyway, and fp32 divisions overflow."""
FAILED = -1
"""The answer for a row whose logits are not finite, or that may draw nothing."""
NOT_ASKED = -1


class Sampler:
    """Sampling settings of every row, and the draw.

    A draw is the inverse of the cumulative distribution over the tokens, likeliest first, at a uniform number that depends on
    (seed, position) alone: who else is in the step cannot change it.
    """

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self.device = device
        self.temperature = np.zeros(max_seqs)
        self.top_k = np.zeros(max_seqs, dtype=np.int64)
        self.top_p = np.ones(max_seqs)
        self.min_p = np.zeros(max_seqs)
        self.seed = np.zeros(max_seqs, dtype=np.uint64)
        self.biases: dict[int, Bias] = {}
        self.penalties: dict[int, Penalties] = {}
        self.matchers: dict[int, Matcher] = {}
        self.scored = np.full(max_seqs, NOT_ASKED)
        self.detailed = np.full(max_seqs, NOT_ASKED)
        self.logprobs = np.zeros(0, dtype=np.float32)
        """Log-probabilities of the tokens that `sample` picked last, 0 where they were not asked for; empty if nobody asked."""
        self.details: dict[int, bytes] = {}
        """By place in the last sample, a line of `logprobs.score` with as many likeliest tokens as the row asked for."""

    def seat(
        self,
        row: int,
        params: SamplingParams,
        tokens: np.ndarray,
        prompt_len: int,
        seed: int,
        *,
        ends: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """Gives `row` to a sequence: its settings, and its tokens so far (prompt, then generated).

        `ends` are the token ids at which it stops, for `min_tokens`. A fresh `matcher` accepts here what was generated; whatever it
        raises, this raises.
        """
        self.temperature[row] = params.temperature and max(params.temperature, LOWEST_TEMPERATURE)
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed % 2**64
        self.detailed[row] = NOT_ASKED if params.logprobs is None else params.logprobs
        self.scored[row] = max(self.detailed[row], 0 if params.ranked else NOT_ASKED)
        self.biases.pop(row, None)
        self.penalties.pop(row, None)
        self.matchers.pop(row, None)
        if Bias.wanted(params):
            self.biases[row] = Bias(params, tokens[prompt_len:].tolist(), ends)
        if params.penalised:
            self.penalties[row] = Penalties(params, tokens, prompt_len, self.device)
        if matcher is not None:
            for token in tokens[prompt_len:].tolist():
                matcher.accept(token)
            self.matchers[row] = matcher

    def sample(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Picks a token for each row of logits [N, vocabulary], which it may overwrite; int32 [N], FAILED where they are not finite.

        `rows` [N] says whose they are, `positions` [N] which place in its sequence the token will take.
        """
        scored = np.flatnonzero(self.scored[rows] != NOT_ASKED)
        untouched = logits[torch.from_numpy(scored)] if scored.size else None
        biased, matched, penalised = _present(self.biases, rows), _present(self.matchers, rows), _present(self.penalties, rows)
        if biased:
            bias.apply(logits, biased)
        if matched:
            mask(logits, matched)
        for i, penalties in penalised:
            penalties.apply(logits[i])
        # NaN is the largest of all to `max`, and of equals the first is taken.
        best, choice = logits.max(-1)
        chosen = choice.cpu().numpy().astype(np.int32)
        drawn = np.flatnonzero(self.temperature[rows] > 0)
        if drawn.size:
            whole = drawn.size == len(rows)
            chosen[drawn] = self._draw(logits if whole else logits[torch.from_numpy(drawn)], rows[drawn], positions[drawn])
        self._score(untouched, scored, rows, chosen)
        chosen[~torch.isfinite(best).cpu().numpy()] = FAILED
        accept(matched, chosen, FAILED)
        said: list[tuple[int, Bias | Penalties]] = [*biased, *penalised]
        for i, so_far in said:
            if chosen[i] != FAILED:
                so_far.add(int(chosen[i]))
        return chosen

    def _score(self, logits: torch.Tensor | None, scored: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> None:
        """Sets `logprobs` and `details`, given the logits of the rows at places `scored`."""
        self.details = {}
        self.logprobs = np.zeros(len(rows) if scored.size else 0, dtype=np.float32)
        if logits is None:
            return
        tokens = torch.from_numpy(chosen[scored].astype(np.int64)).to(self.device)
        lines = logprobs.score(logits, tokens, int(self.scored[rows[scored]].max()))
        self.logprobs[scored] = logprobs.logprobs(lines)
        counts = self.detailed[rows[scored]]
        for line in np.flatnonzero(counts != NOT_ASKED).tolist():
            self.details[int(scored[line])] = logprobs.packed(lines[line : line + 1], int(counts[line]))

    def _draw(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Draws for rows of which none is greedy; those with NaN get an arbitrary token."""
        vocabulary = logits.shape[1]

        def column(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(self.device).unsqueeze(1)

        temperature, top_p, min_p = column(self.temperature[rows]), column(self.top_p[rows]), column(self.min_p[rows])
        top_k = self.top_k[rows]
        top_k = column(np.where(top_k == 0, vocabulary, np.minimum(top_k, vocabulary)))
        uniform = column(uniforms(self.seed[rows], positions))
        best = logits.max(-1, keepdim=True).values
        total = ((logits - best) / temperature.float()).exp_().sum(-1, keepdim=True, dtype=torch.float64)
        chosen = top_k.new_empty(len(rows))
        # Each round decides the rows that it can, and leaves to the next the ones that may reach beyond its candidates.
        left = torch.arange(len(rows), device=self.device)
        for count in (*CANDIDATES, vocabulary):
            whole = len(left) == len(rows)
            values, tokens = (logits if whole else logits[left]).topk(min(count, vocabulary))
            weights = ((values - best[left]).double() / temperature[left]).exp_()
            place, known = _pick(weights, vocabulary, total[left], top_k[left], top_p[left], min_p[left], uniform[left])
            chosen[left] = tokens.gather(1, place).squeeze(1)
            left = left[~known.squeeze(1)]
            if not len(left):
                break
        return chosen.cpu().numpy().astype(np.int32)


T = TypeVar("T")


def _present(held: Mapping[int, T], rows: np.ndarray) -> list[tuple[int, T]]:
    """What the rows of a step have of something that few have, by their place in the step."""
    return [(i, held[row]) for i, row in enumerate(rows.tolist()) if row in held] if held else []


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
