"""What a session takes alone on a server: the times of one session that was replayed alone give those of the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.record import Record
from chairlift.bench.sessions import RecordedSession


@dataclass(frozen=True, slots=True)
class Alone:
    """The times of a request that is alone on a server, in seconds."""

    first_token: float
    """The time to the first token of a prompt that the cache has."""
    prompt_token: float
    """The further time for each token of the prompt that is computed."""
    prompt_pair: float
    """The further time for each pair of a computed token and a token before it."""
    output_token: float
    """The time of each output token after the first."""

    @classmethod
    def fitted(cls, records: Sequence[Record], fresh: Sequence[int]) -> Alone:
        """Fits the times to answered requests. `fresh` has their new prompt tokens, for servers that do not report cached ones."""
        computed = [
            tokens if record.cached_tokens is None else record.prompt_tokens - record.cached_tokens
            for record, tokens in zip(records, fresh, strict=True)
        ]
        work = [_work(record.prompt_tokens, tokens) for record, tokens in zip(records, computed, strict=True)]
        first_token, prompt_token, prompt_pair = _least_squares(np.array(work), np.array([record.ttft for record in records]))
        decoding = sum(record.times[-1] - record.times[0] for record in records)
        decoded = sum(record.output_tokens - 1 for record in records)
        return cls(first_token, prompt_token, prompt_pair, decoding / max(1, decoded))

    def request(self, prompt: int, fresh: int, output: int) -> float:
        """The time of a request of `prompt` tokens, of which `fresh` are computed, and of `output` tokens."""
        first_token, tokens, pairs = _work(prompt, fresh)
        before = self.first_token * first_token + self.prompt_token * tokens + self.prompt_pair * pairs
        return before + self.output_token * max(0, output - 1)


def sample(sessions: Sequence[RecordedSession]) -> RecordedSession:
    """The main thread of the session whose longest prompt is the median, with a beginning of its own."""
    session = sorted(sessions, key=lambda one: max(turn.prompt_tokens for turn in one.threads[0]))[len(sessions) // 2]
    return replace(session, threads=[[replace(turn, subagents=range(0)) for turn in session.threads[0]]], shared=0)


def _work(prompt: int, computed: int) -> tuple[float, float, float]:
    """What the time to a first token depends on: 1, the computed tokens, and their pairs with the tokens before them."""
    return 1.0, float(computed), computed * (prompt - computed / 2)


def _least_squares(work: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """The weights of the columns of `work` by least squares, none of them below 0."""
    best, least = [0.0, 0.0, 0.0], np.inf
    # With some weights 0, the others are the best ones without that bound. Of equal errors the fewest weights count.
    for used in sorted(itertools.product((False, True), repeat=3), key=sum):
        weights = np.zeros(3)
        weights[list(used)] = np.linalg.lstsq(work[:, used], seconds, rcond=None)[0] if any(used) else 0.0
        error = float(np.sum((work @ weights - seconds) ** 2))
        if error < least - 1e-9 * float(seconds @ seconds) and (weights >= 0).all():
            best, least = weights.tolist(), error
    return best
