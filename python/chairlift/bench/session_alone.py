"""What a session takes alone on a server: the times of one session that was replayed alone give those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chairlift.bench.record import Record
from chairlift.bench.sessions import RecordedSession


@dataclass(frozen=True, slots=True)
class Alone:
    """The times of a request that is alone on a server, in seconds."""

    first_token: float
    """The time to the first token of a prompt that the cache has."""
    prompt_token: float
    """The further time for each token of the prompt that is computed."""
    output_token: float
    """The time of each output token after the first."""

    @classmethod
    def fitted(cls, records: Sequence[Record], fresh: Sequence[int]) -> Alone:
        """Fits the times to answered requests. `fresh` has their new prompt tokens, for servers that do not report cached ones."""
        computed = [
            tokens if record.cached_tokens is None else record.prompt_tokens - record.cached_tokens
            for record, tokens in zip(records, fresh, strict=True)
        ]
        first_token, prompt_token = _line(np.array(computed, float), np.array([record.ttft for record in records]))
        decoding = sum(record.times[-1] - record.times[0] for record in records)
        return cls(first_token, prompt_token, decoding / max(1, sum(record.output_tokens - 1 for record in records)))

    def request(self, computed: int, output: int) -> float:
        """The time of a request of which `computed` prompt tokens are computed and `output` tokens generated."""
        return self.first_token + self.prompt_token * computed + self.output_token * max(0, output - 1)


def sample(sessions: Sequence[RecordedSession]) -> RecordedSession:
    """The main thread of the session with the median number of requests, with a beginning of its own."""
    session = sorted(sessions, key=lambda one: len(one.threads[0]))[len(sessions) // 2]
    return replace(session, threads=[[replace(turn, subagents=range(0)) for turn in session.threads[0]]], shared=0)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The line by least squares, as its value at 0 and its slope, neither of them below 0."""
    spread = x - x.mean()
    slope = max(0.0, float(spread @ y) / max(float(spread @ spread), 1e-9))
    start = float(y.mean()) - slope * float(x.mean())
    return (start, slope) if start >= 0 else (0.0, float(x @ y) / float(x @ x))
