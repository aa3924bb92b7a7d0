"""What comes: the lengths of requests, and how they arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from chairlift.bench.arrivals import arrivals
from chairlift.bench.traces import TraceRequest
from chairlift.bench.workload import random_jobs
from chairlift.errors import InvalidSetting
from chairlift.sim.workload import Workload

FEWEST = 400
"""Requests of a spell, at least: a 95th percentile rests on the slowest twenty of them."""

MOST = 20_000
"""And at most: many more say no more, and take long to simulate."""

_APART_US = 3_600_000_000
"""Between requests that are to be alone."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Mix:
    """Requests by their lengths, and when they come.

    Prompts and outputs are drawn evenly from their length times `1 ± spread`, as `chairlift bench` draws them; a `trace` has lengths of
    its own. They come as `bench.arrivals` says, or with `timed` when the trace says, faster or slower. Raises InvalidSetting.
    """

    prompt_tokens: int = 256
    output_tokens: int = 128
    spread: float = 0.0
    burstiness: float = 1.0
    trace: Workload | None = None
    timed: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or not 0 <= self.spread < 1 or not self.burstiness > 0:
            raise InvalidSetting("a mix needs lengths of one token at least, a spread from 0 to below 1, and a burstiness above 0")
        if self.trace is not None and not len(self.trace):
            raise InvalidSetting("the trace has no request")
        if self.timed and (self.trace is None or self.trace.column("arrival_us")[-1] == 0):
            raise InvalidSetting("the trace has no times: let its requests come at random (--no-self-timed)")

    @property
    def seeds(self) -> range:
        """Seeds of spells that differ: a trace at its own times is always the same."""
        return range(1 if self.timed else 5)

    @property
    def mean_output(self) -> float:
        """Tokens of an answer, the mean."""
        return self.output_tokens if self.trace is None else float(self.trace.column("output").mean())

    def spell(self, rate: float, seconds: float, seed: int) -> Workload:
        """About so many seconds of requests at `rate` a second, from `FEWEST` to `MOST`; a trace at its own times is taken whole."""
        if self.trace is not None and self.timed:
            own = len(self.trace) / (int(self.trace.column("arrival_us")[-1]) / 1e6)
            return self.trace.faster(rate / own)
        count = self._count(rate, seconds)
        times = np.rint(np.array(arrivals(count, rate, self.burstiness, seed)) * 1e6).astype(np.int64)
        return self._requests(count, seed).with_(arrival_us=times)

    def longest_wait(self, rate: float, seconds: float) -> float:
        """Seconds that a request of such a spell may wait at most: a queue of a twentieth of it would grow if it went on."""
        return math.inf if self.timed else self._count(rate, seconds) / rate / 20

    def alone(self) -> Workload:
        """Requests so far apart that none meets another."""
        some = self._requests(FEWEST if self.trace is None else min(FEWEST, len(self.trace)), 0)
        return some.with_(arrival_us=_APART_US * np.arange(len(some)))

    def fitting(self, longest: int) -> Mix:
        """The same without those of a trace of more than `longest` tokens, prompt and output; raises InvalidSetting if none is left."""
        if self.trace is None:
            most = int(self.prompt_tokens * (1 + self.spread)) + int(self.output_tokens * (1 + self.spread))
            if most > longest:
                raise InvalidSetting(f"prompt and answer are up to {most} tokens, and the longest context is {longest}: ask for fewer")
            return self
        fits = self.trace.column("prompt") + self.trace.column("output") <= longest
        if not fits.any():
            raise InvalidSetting(f"all requests of the trace are longer than the longest context, {longest} tokens")
        names = self.trace.names[np.repeat(fits, self.trace.column("names"))]
        return replace(self, trace=replace(self.trace, requests=self.trace.requests[fits], names=names))

    def left_out(self, fits: Mix) -> int:
        """Requests of the trace that are not in `fits`."""
        return 0 if self.trace is None or fits.trace is None else len(self.trace) - len(fits.trace)

    def _requests(self, count: int, seed: int) -> Workload:
        if self.trace is not None:
            return self.trace.first(count) if count <= len(self.trace) else self.trace.repeated(count)
        # Powers of two are drawn once for several rates.
        return _drawn(1 << (count - 1).bit_length(), self.prompt_tokens, self.output_tokens, self.spread, seed).first(count)

    def _count(self, rate: float, seconds: float) -> int:
        return min(MOST, max(FEWEST, math.ceil(rate * seconds)))


@lru_cache(maxsize=32)
def _drawn(count: int, prompt_tokens: int, output_tokens: int, spread: float, seed: int) -> Workload:
    jobs = random_jobs(count, prompt_tokens, output_tokens, range_ratio=spread, seed=seed)
    return Workload.of([TraceRequest(0.0, job.prompt_tokens, job.output_tokens) for job in jobs])
