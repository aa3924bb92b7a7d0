"""Draws tokens on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chairlift.runner.buffers import StepBuffers
from chairlift.runner.pending import PendingResult, ReadyResult
from chairlift.runner.sampling import logprobs
from chairlift.runner.sampling.bias import NEVER
from chairlift.runner.sampling.choice import LOWEST_TEMPERATURE, choose
from chairlift.runner.sampling.penalties import Penalties
from chairlift.runner.sampling.philox import uniforms
from chairlift.runner.sampling.sampler import Drawn, Scored, entries_of
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.runner.cuda_graphs import Graph


class HostSampler:
    """A `TokenSampler` on the host.

    A draw inverts the cumulative distribution over the tokens, most likely first, at a uniform number that depends only on (seed,
    position). The work is done in Rust, on `threads` threads.
    """

    def __init__(self, max_seqs: int, threads: int) -> None:
        self._threads = threads
        self.temperature = np.zeros(max_seqs)
        self.top_k = np.zeros(max_seqs, dtype=np.int64)
        self.top_p = np.ones(max_seqs)
        self.min_p = np.zeros(max_seqs)
        self.seed = np.zeros(max_seqs, dtype=np.uint64)
        self.penalties: dict[int, Penalties] = {}

    def add_request(self, slot: int, params: SamplingParams, tokens: np.ndarray, prompt_len: int, seed: int) -> None:
        """Assigns a slot to a sequence with these tokens (prompt, then output)."""
        self.temperature[slot] = params.temperature and max(params.temperature, LOWEST_TEMPERATURE)
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = seed % 2**64
        if params.penalised:
            self.penalties[slot] = Penalties(params, tokens, prompt_len)

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

    def draw(
        self,
        logits: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        buffers: StepBuffers,
        graph: Graph | None,
        scored: Scored | None,
    ) -> Drawn:
        """Draws a token per row of logits [N, vocabulary], which it may overwrite."""
        penalised = entries_of(self.penalties, slots)
        for i, penalties in penalised:
            penalties.apply(logits[i])
        temperature = self.temperature[slots]
        drawn = uniforms(self.seed[slots], positions) if temperature.any() else np.zeros(len(slots))
        settings = temperature, self.top_k[slots], self.top_p[slots], self.min_p[slots]
        chosen = choose(logits, *settings, drawn, threads=self._threads)
        # The lines of failed samples are not used, but need a valid token.
        lines = None if scored is None else self.score(scored.logits, np.maximum(chosen[scored.at], 0), scored.num_top)
        return Drawn(ReadyResult(chosen), lines, penalised)

    def score(self, logits: np.ndarray, tokens: np.ndarray, count: int) -> PendingResult:
        """Computes lines of `logprobs.score` for tokens [M], given logits [M, vocabulary]."""
        return ReadyResult(logprobs.score(logits, tokens, count, threads=self._threads))
