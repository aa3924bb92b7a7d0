"""The workload that a plan tries at many rates: the lengths of requests and their arrival process."""

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

MIN_REQUESTS, MAX_REQUESTS = 400, 20_000
"""Requests of one workload. The slowest 5 % of 400 are 20 requests; more than 20,000 take long and change little."""

_ISOLATED_US = 3_600_000_000
"""Microseconds between isolated requests."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WorkloadSpec:
    """The lengths of requests and their arrivals.

    Prompt and output lengths are uniform within `1 ± spread` times their mean, as in `chairlift bench`; a `trace` has its own lengths.
    Arrivals come from `bench.arrivals`, or with `timed` from the trace, scaled to the rate. Raises InvalidSetting.
    """

    prompt_tokens: int = 256
    output_tokens: int = 128
    spread: float = 0.0
    burstiness: float = 1.0
    trace: Workload | None = None
    timed: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or not 0 <= self.spread < 1 or not self.burstiness > 0:
            raise InvalidSetting("expected lengths of at least one token, a spread from 0 to below 1, and a burstiness above 0")
        if self.trace is not None and not len(self.trace):
            raise InvalidSetting("the trace has no request")
        if self.timed and (self.trace is None or self.trace.column("arrival_us")[-1] == 0):
            raise InvalidSetting("the trace has no arrival times: use random ones (--no-self-timed)")

    @property
    def seeds(self) -> range:
        """Seeds to try: one for a trace at its own times, which is always the same."""
        return range(1 if self.timed else 5)

    @property
    def mean_output(self) -> float:
        """Mean output tokens of a request."""
        return self.output_tokens if self.trace is None else float(self.trace.column("output").mean())

    def sample(self, rate: float, seconds: float, seed: int) -> Workload:
        """About `seconds` of requests at `rate` a second, within `MIN_REQUESTS` and `MAX_REQUESTS`. A timed trace is repeated whole."""
        count = self._count(rate, seconds)
        if self.trace is not None and self.timed:
            repeated = self.trace.repeated(count)
            own = count / (int(repeated.column("arrival_us")[-1]) / 1e6)
            return repeated.faster(rate / own)
        times = np.rint(np.array(arrivals(count, rate, self.burstiness, seed)) * 1e6).astype(np.int64)
        return self._requests(count, seed).with_(arrival_us=times)

    def max_wait(self, rate: float, seconds: float) -> float:
        """The longest wait in seconds in a stable queue: 5 % of the duration. A longer one would grow without bound."""
        return self._count(rate, seconds) / rate / 20

    def isolated(self) -> Workload:
        """Requests so far apart that they never run together."""
        requests = self._requests(MIN_REQUESTS if self.trace is None else min(MIN_REQUESTS, len(self.trace)), 0)
        return requests.with_(arrival_us=_ISOLATED_US * np.arange(len(requests)))

    def fitting(self, *longest: int) -> WorkloadSpec:
        """The same without the requests of more tokens than their model's `longest`, prompt and output.

        Raises InvalidSetting if none is left.
        """
        if self.trace is None:
            most = int(self.prompt_tokens * (1 + self.spread)) + int(self.output_tokens * (1 + self.spread))
            if most > longest[0]:
                raise InvalidSetting(f"prompt and output have up to {most} tokens: the longest context is {longest[0]}")
            return self
        # One model has all requests, whatever a trace calls theirs.
        own = np.array(longest)[self.trace.column("model") if len(longest) > 1 else np.zeros(len(self.trace), np.int64)]
        fits = self.trace.column("prompt") + self.trace.column("output") <= own
        if not fits.any():
            raise InvalidSetting(f"all requests of the trace exceed the longest context of {max(longest)} tokens")
        names = self.trace.names[np.repeat(fits, self.trace.column("names"))]
        return replace(self, trace=replace(self.trace, requests=self.trace.requests[fits], names=names))

    def excluded(self, fits: WorkloadSpec) -> int:
        """The number of the trace's requests that `fits` lacks."""
        return 0 if self.trace is None or fits.trace is None else len(self.trace) - len(fits.trace)

    def _requests(self, count: int, seed: int) -> Workload:
        if self.trace is not None:
            return self.trace.first(count) if count <= len(self.trace) else self.trace.repeated(count)
        # Rounded up to a power of two, so that the cache serves several rates.
        return _draw(1 << (count - 1).bit_length(), self.prompt_tokens, self.output_tokens, self.spread, seed).first(count)

    def _count(self, rate: float, seconds: float) -> int:
        count = min(MAX_REQUESTS, max(MIN_REQUESTS, math.ceil(rate * seconds)))
        if self.trace is None or not self.timed:
            return count
        return math.ceil(count / len(self.trace)) * len(self.trace)


@lru_cache(maxsize=32)
def _draw(count: int, prompt_tokens: int, output_tokens: int, spread: float, seed: int) -> Workload:
    jobs = random_jobs(count, prompt_tokens, output_tokens, range_ratio=spread, seed=seed)
    return Workload.of([TraceRequest(0.0, job.prompt_tokens, job.output_tokens) for job in jobs])
