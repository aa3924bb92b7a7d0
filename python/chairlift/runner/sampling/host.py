"""Draws tokens on the host, after penalties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chairlift import _core
from chairlift.runner.buffers import PendingResult, ReadyResult, StepBuffers
from chairlift.runner.sampling import logprobs
from chairlift.runner.sampling.bias import NEVER
from chairlift.runner.sampling.sampler import LOWEST_TEMPERATURE, Drawn, Scored, entries_of
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.runner.cuda_graphs import Graph
    from chairlift.runner.interface import NewSequence


class HostSampler:
    """A `TokenSampler` on the host.

    A draw inverts the cumulative distribution over the tokens, most likely first, at a uniform number that depends only on (seed,
    position). The work is done in Rust, on the threads of `pool`.
    """

    def __init__(self, max_seqs: int, pool: _core.ThreadPool) -> None:
        self._pool = pool
        self.temperature = np.zeros(max_seqs)
        self.top_k = np.zeros(max_seqs, dtype=np.int64)
        self.top_p = np.ones(max_seqs)
        self.min_p = np.zeros(max_seqs)
        self.seed = np.zeros(max_seqs, dtype=np.uint64)
        self.penalties: dict[int, Penalties] = {}

    def add_request(self, slot: int, sequence: NewSequence) -> None:
        """Assigns a slot to a sequence."""
        params = sequence.params
        self.temperature[slot] = params.temperature and max(params.temperature, LOWEST_TEMPERATURE)
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = sequence.seed % 2**64
        if params.penalised:
            self.penalties[slot] = Penalties(params, sequence.tokens, sequence.prompt_len)

    def remove_request(self, slot: int) -> None:
        """Frees a slot."""
        self.penalties.pop(slot, None)

    def send(self, array: np.ndarray) -> np.ndarray:
        """The array."""
        return array

    def mask(self, logits: np.ndarray, rows: np.ndarray, octets: np.ndarray) -> None:
        """Masks tokens that are not allowed."""
        allowed = np.unpackbits(octets, axis=1, count=logits.shape[1], bitorder="little")
        for row, tokens in zip(rows, allowed, strict=True):
            np.putmask(logits[row], tokens == 0, NEVER)

    def keeps_logits(self, slots: np.ndarray) -> bool:
        """Whether none of these slots has penalties."""
        return self.penalties.keys().isdisjoint(slots.tolist())

    def draw(self, logits: np.ndarray, buffers: StepBuffers, graph: Graph | None, scored: Scored | None) -> Drawn:
        """Draws a token per row of logits [N, vocabulary] in fp32, which it may overwrite.

        The token of a row with a NaN or without a finite best logit is FAILED. Temperature 0 takes the first of the most likely tokens.
        """
        slots = buffers.sample_slots[: len(logits)]
        penalised = entries_of(self.penalties, slots)
        for i, penalties in penalised:
            penalties.apply(logits[i])
        positions = buffers.positions[buffers.sample_at[: len(logits)]] + 1
        settings = self.temperature[slots], self.top_k[slots], self.top_p[slots], self.min_p[slots], self.seed[slots]
        chosen = np.frombuffer(self._pool.choose(logits, *settings, positions), dtype=np.int32).copy()
        # The lines of failed samples are not used, but need a valid token.
        lines = None if scored is None else self.score(scored.logits, np.maximum(chosen[scored.at], 0), scored.num_top)
        return Drawn(ReadyResult(chosen), lines, penalised)

    def score(self, logits: np.ndarray, tokens: np.ndarray, count: int) -> PendingResult:
        """Computes lines of `logprobs.score` for tokens [M], given logits [M, vocabulary]."""
        return ReadyResult(logprobs.score(self._pool, logits, tokens, count))


class Penalties:
    """The token counts and penalties of one sequence.

    The repetition penalty applies to tokens of the prompt and the output (as in transformers: positive logits are divided by it,
    negative ones multiplied). Presence and frequency penalties apply to the output (as in OpenAI's API: subtracted once, or once per
    occurrence). The cost per step depends on the number of distinct tokens, not on the vocabulary.
    """

    def __init__(self, params: SamplingParams, tokens: np.ndarray, prompt_len: int) -> None:
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.repetition, self.presence, self.frequency = map(np.float32, penalties)
        distinct, inverse = np.unique(tokens, return_inverse=True)
        self.columns = {token: column for column, token in enumerate(distinct.tolist())}
        self.distinct = distinct.astype(np.int64)
        self.counts = np.bincount(inverse[prompt_len:], minlength=len(distinct)).astype(np.float32)

    def apply(self, logits: np.ndarray) -> None:
        """Penalises the logits [vocabulary] of the sequence's next token."""
        found = logits[self.distinct]
        if self.repetition != 1:
            found = np.where(found > 0, found / self.repetition, found * self.repetition)
        logits[self.distinct] = found - self.counts * self.frequency - (self.counts > 0) * self.presence

    def add(self, token: int) -> None:
        """Counts the next token of the output."""
        column = self.columns.setdefault(token, len(self.columns))
        if column == len(self.distinct):
            self.distinct = np.append(self.distinct, token)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[column] += 1
