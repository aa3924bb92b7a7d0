"""Chooses the next tokens from logits, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from chairlift.runner.copy_stream import CopyStream, PendingResult, ReadyResult, send
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.sampling import bias, logprobs
from chairlift.runner.sampling.bias import Bias
from chairlift.runner.sampling.choice import FAILED, LOWEST_TEMPERATURE, choose
from chairlift.runner.sampling.device import DeviceSampler
from chairlift.runner.sampling.matcher import Matcher, accept, mask
from chairlift.runner.sampling.penalties import Penalties
from chairlift.runner.sampling.philox import uniforms
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.runner.cuda_graphs import Graph

NOT_ASKED = -1


@dataclass(slots=True)
class Draw:
    """The sample of one step, from `Sampler.draw` to `Sampler.take`: what is on its way, and who must hear of it.

    By the time that tokens arrive a row may have been given to somebody else.
    """

    tokens: PendingResult
    lines: PendingResult | None
    """Lines of `logprobs.score` for the places `scored`, with as many likeliest tokens as any row asked for; None if none did."""
    scored: np.ndarray
    counts: np.ndarray
    """For each place of `scored`, how many likeliest tokens its row asked for."""
    matched: list[tuple[int, Matcher]]
    told: list[tuple[int, Bias | Penalties]]


class Sampler:
    """Sampling settings of every row, and the draw.

    Who else is in a step cannot change a draw. On the host it is the inverse of the cumulative distribution over the tokens, likeliest
    first, at a uniform number that depends on (seed, position) alone; on a device it is the drawer's, which keeps penalties as well.
    """

    def __init__(self, max_seqs: int, device: torch.device, drawer: DeviceSampler | None = None, courier: CopyStream | None = None) -> None:
        """`device` is where logits are; with a `drawer` tokens are drawn there, and come to the host by `courier`."""
        self.device = device
        self._drawer, self._courier = drawer, courier or CopyStream(device)
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
        self.leave(row)
        self.detailed[row] = NOT_ASKED if params.logprobs is None else params.logprobs
        self.scored[row] = max(self.detailed[row], 0 if params.ranked else NOT_ASKED)
        if self._drawer is not None:
            self._drawer.seat(row, params, tokens, prompt_len, seed)
        else:
            self.temperature[row] = params.temperature and max(params.temperature, LOWEST_TEMPERATURE)
            self.top_k[row] = params.top_k
            self.top_p[row] = params.top_p
            self.min_p[row] = params.min_p
            self.seed[row] = seed % 2**64
            if params.penalised:
                self.penalties[row] = Penalties(params, tokens, prompt_len, self.device)
        if Bias.wanted(params):
            self.biases[row] = Bias(params, tokens[prompt_len:].tolist(), ends)
        if matcher is not None:
            for token in tokens[prompt_len:].tolist():
                matcher.accept(token)
            self.matchers[row] = matcher

    def leave(self, row: int) -> None:
        """Forgets what few rows have, and what was asked of log-probabilities: whoever has `row` is at its end.

        A step planned before that was known may still sample for it, and nobody reads what that gives.
        """
        self.detailed[row] = self.scored[row] = NOT_ASKED
        self.biases.pop(row, None)
        self.penalties.pop(row, None)
        self.matchers.pop(row, None)

    def draw(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, step: DeviceBuffers | None = None, graph: Graph | None = None
    ) -> Draw:
        """Asks for a token for each row of logits [N, vocabulary], which it may overwrite.

        `rows` [N] says whose they are, `positions` [N] which place in its sequence the token will take. A drawer reads both in `step`.
        With the `graph` that gave them, the logits must still be where it put them.
        What rows have heard of their tokens counts: the sample before this one must have been taken.
        """
        scored = np.flatnonzero(self.scored[rows] != NOT_ASKED)
        biased, matched, penalised = _present(self.biases, rows), _present(self.matchers, rows), _present(self.penalties, rows)
        untouched = None
        if scored.size:
            same = self._drawer is None and scored.size == len(rows) and not (biased or matched or penalised)
            untouched = logits if same else logits[send(scored, self.device)]
        if biased:
            bias.apply(logits, biased)
        if matched:
            mask(logits, matched)
        for i, penalties in penalised:
            penalties.apply(logits[i])
        tokens, lines = self._draw(logits, rows, positions, step, graph, untouched, scored)
        told: list[tuple[int, Bias | Penalties]] = [*biased, *penalised]
        return Draw(tokens, lines, scored, self.detailed[rows[scored]], matched, told)

    def take(self, draw: Draw) -> tuple[np.ndarray, np.ndarray, dict[int, bytes]]:
        """Waits for what was drawn, and tells who must hear of it: the first three of `Sampled`."""
        chosen = draw.tokens.numpy()
        logprob = np.zeros(len(chosen) if draw.scored.size else 0, dtype=np.float32)
        details = {}
        if draw.lines is not None:
            lines = draw.lines.numpy()
            logprob[draw.scored] = logprobs.logprobs(lines)
            for line in np.flatnonzero(draw.counts != NOT_ASKED).tolist():
                details[int(draw.scored[line])] = logprobs.packed(lines[line : line + 1], int(draw.counts[line]))
        accept(draw.matched, chosen, FAILED)
        for i, so_far in draw.told:
            if chosen[i] != FAILED:
                so_far.add(int(chosen[i]))
        return chosen, logprob, details

    def score(self, logits: torch.Tensor, tokens: np.ndarray, count: int) -> PendingResult:
        """Lines of `logprobs.score` for tokens [M], given logits [M, vocabulary]."""
        targets = send(tokens.astype(np.int64), self.device)
        if self._drawer is None:
            return ReadyResult(logprobs.score(logits, targets, count))
        places = torch.arange(len(targets), device=self.device)
        return self._courier.fetch(self._drawer.score(logits, places, targets, count))

    def _draw(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        step: DeviceBuffers | None,
        graph: Graph | None,
        untouched: torch.Tensor | None,
        scored: np.ndarray,
    ) -> tuple[PendingResult, PendingResult | None]:
        """The tokens, and the lines of the places `scored`, whose logits are `untouched`."""
        count = int(self.scored[rows[scored]].max()) if scored.size else 0
        lines: PendingResult | None = None
        if self._drawer is None:
            temperature = self.temperature[rows]
            drawn = uniforms(self.seed[rows], positions) if temperature.any() else np.zeros(len(rows))
            chosen = choose(logits, temperature, self.top_k[rows], self.top_p[rows], self.min_p[rows], drawn)
            if untouched is not None:
                # Nobody reads the lines of rows that failed, but they must be of some token.
                lines = self.score(untouched, np.maximum(chosen[scored], 0), count)
            return ReadyResult(chosen), lines
        assert step is not None
        tier = self._drawer.prepare(rows)
        if graph is not None:
            tokens = graph.sample(tier, len(rows))
        else:
            at = step.sample_at[: len(rows)]
            tokens = self._drawer.sample(logits, step.sample_slots[: len(rows)], step.positions[at] + 1, tier)
        if untouched is not None:
            places = torch.arange(scored.size, device=self.device)
            lines = self._courier.fetch(self._drawer.score(untouched, places, tokens[send(scored, self.device)], count))
        return self._courier.fetch(tokens), lines


T = TypeVar("T")


def _present(held: Mapping[int, T], rows: np.ndarray) -> list[tuple[int, T]]:
    """What the rows of a step have of something that few have, by their place in the step."""
    return [(i, held[row]) for i, row in enumerate(rows.tolist()) if row in held] if held else []
