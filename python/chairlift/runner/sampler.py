"""Chooses the next tokens from logits, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from chairlift.runner import bias, logprobs
from chairlift.runner.bias import Bias
from chairlift.runner.choice import FAILED, choose
from chairlift.runner.matcher import Matcher, accept, mask
from chairlift.runner.penalties import Penalties
from chairlift.runner.philox import uniforms
from chairlift.sampling import SamplingParams

LOWEST_TEMPERATURE = 1e-5
"""Below this all weight is on the likeliest token anyway, and fp32 divisions overflow."""
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
        biased, matched, penalised = _present(self.biases, rows), _present(self.matchers, rows), _present(self.penalties, rows)
        untouched = None
        if scored.size:
            same = scored.size == len(rows) and not (biased or matched or penalised)
            untouched = logits if same else logits[torch.from_numpy(scored)]
        if biased:
            bias.apply(logits, biased)
        if matched:
            mask(logits, matched)
        for i, penalties in penalised:
            penalties.apply(logits[i])
        temperature = self.temperature[rows]
        drawn = uniforms(self.seed[rows], positions) if temperature.any() else np.zeros(len(rows))
        chosen = choose(logits, temperature, self.top_k[rows], self.top_p[rows], self.min_p[rows], drawn)
        self._score(untouched, scored, rows, chosen)
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
        # Nobody reads the lines of rows that failed, but they must be of some token.
        tokens = torch.from_numpy(np.maximum(chosen[scored], 0).astype(np.int64)).to(self.device)
        lines = logprobs.score(logits, tokens, int(self.scored[rows[scored]].max()))
        self.logprobs[scored] = logprobs.logprobs(lines)
        counts = self.detailed[rows[scored]]
        for line in np.flatnonzero(counts != NOT_ASKED).tolist():
            self.details[int(scored[line])] = logprobs.packed(lines[line : line + 1], int(counts[line]))


T = TypeVar("T")


def _present(held: Mapping[int, T], rows: np.ndarray) -> list[tuple[int, T]]:
    """What the rows of a step have of something that few have, by their place in the step."""
    return [(i, held[row]) for i, row in enumerate(rows.tolist()) if row in held] if held else []
