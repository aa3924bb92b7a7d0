"""Figures of a run: latencies, rates and goodput as vLLM defines them, and time series."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chairlift.bench.record import Record
from chairlift.errors import InvalidSetting

TARGETS = ("ttft", "tpot", "e2el")
"""The latencies that can have a target."""


@dataclass(frozen=True)
class Latency:
    """One kind of latency of all requests, in seconds. Its figures are 0 if there are no values, as in vLLM."""

    values: tuple[float, ...]
    """Sorted."""

    @property
    def mean(self) -> float:
        """The mean."""
        return float(np.mean(self.values or 0))

    @property
    def std(self) -> float:
        """The standard deviation."""
        return float(np.std(self.values or 0))

    def percentile(self, percent: float) -> float:
        """A percentile, linearly interpolated."""
        return float(np.percentile(self.values or 0, percent))


@dataclass(frozen=True)
class Goodput:
    """Targets for each request: upper limits of `ttft`, `tpot` and `e2el` in milliseconds (DistServe, OSDI'24)."""

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, pairs: Iterable[str]) -> Goodput:
        """Parses pairs like `ttft:200`; raises InvalidSetting."""
        limits = {}
        for pair in pairs:
            name, _, text = pair.partition(":")
            try:
                limits[name] = float(text)
            except ValueError:
                limits[name] = math.nan
            if name not in TARGETS or not limits[name] >= 0:
                raise InvalidSetting(f"--goodput {pair}: expected pairs like ttft:500 tpot:50 e2el:10000, in milliseconds")
        return cls(limits)

    def met(self, record: Record) -> bool:
        """Whether a request succeeded and met all targets. A single token has no TPOT and always meets that target."""
        if not record.ok:
            return False
        seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2el}
        return all(seconds[name] * 1e3 <= limit for name, limit in self.limits.items())

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} ≤ {limit:g} ms" for name, limit in self.limits.items())


class Figures:
    """The figures of a run. Latencies cover successful requests; failures are counted by kind."""

    def __init__(self, records: Sequence[Record], goodput: Goodput | None = None) -> None:
        done = [record for record in records if record.ok]
        self.requests, self.completed, self.failed = len(records), len(done), len(records) - len(done)
        self.failures = Counter(record.failure for record in records if not record.ok)
        self.duration = max((record.end for record in records), default=0.0)
        """Seconds from the start to the last end."""
        self.input_tokens = sum(record.prompt_tokens for record in done)
        self.output_tokens = sum(record.output_tokens for record in done)
        cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
        self.cached_tokens = sum(cached) if cached else None
        metered = [(record.energy_joules, record.output_tokens) for record in done if record.energy_joules is not None]
        tokens = sum(tokens for _, tokens in metered)
        self.joules_per_token = sum(joules for joules, _ in metered) / tokens if tokens else None
        """Energy of an output token, over the requests whose energy the server reports; None without any."""
        self.latencies = {
            "ttft": _latency(record.ttft for record in done),
            "tpot": _latency(tpot for record in done if (tpot := record.tpot) is not None),
            "itl": _latency(itl for record in done for itl in record.itls),
            "e2el": _latency(record.e2el for record in done),
            "lag": _latency(record.lag for record in records),
            "wait": _latency(record.admitted - record.due for record in records),
        }
        """By name. `lag` is the delay of sends by the client itself, `wait` the time spent waiting for the concurrency limit."""
        self.goodput = goodput
        self.good = sum(map(goodput.met, records)) if goodput else None
        """Requests that met the targets; None without targets."""
        first = min((record.sent for record in done), default=0.0)
        seconds = ((int(record.sent - first), int(record.times[-1] - first) + 1) for record in done)
        self.peak_concurrency = max(concurrency(seconds)[1], default=0)
        """The most requests in flight during any one second, not necessarily at the same instant."""
        per_second: dict[int, float] = {}
        for record in done:
            for time in record.times:
                second = int(time - first)
                per_second[second] = per_second.get(second, 0.0) + record.output_tokens / len(record.times)
        self.peak_output_rate = max(per_second.values(), default=0.0)
        """The most output tokens in one second. A request's tokens are spread evenly over its events."""

    def rate(self, count: float) -> float:
        """`count` a second over the whole run."""
        return count / self.duration if self.duration else 0.0

    @property
    def attainment(self) -> float | None:
        """The share of all requests, including failed ones, that met the targets."""
        return None if self.good is None or not self.requests else self.good / self.requests

    def to_json(self, percentiles: Sequence[float] = (50, 90, 95, 99)) -> dict[str, object]:
        """The figures as JSON, with the names of vLLM's result files where it has them."""
        plain: dict[str, object] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "failures": dict(self.failures),
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "cached_input_tokens": self.cached_tokens,
            "request_throughput": self.rate(self.completed),
            "request_goodput": None if self.good is None else self.rate(self.good),
            "goodput_attainment": self.attainment,
            "output_throughput": self.rate(self.output_tokens),
            "total_token_throughput": self.rate(self.input_tokens + self.output_tokens),
            "joules_per_output_token": self.joules_per_token,
            "max_output_tokens_per_s": self.peak_output_rate,
            "max_concurrent_requests": self.peak_concurrency,
        }
        for name, latency in self.latencies.items():
            plain |= {f"mean_{name}_ms": latency.mean * 1e3, f"median_{name}_ms": latency.percentile(50) * 1e3}
            plain |= {f"std_{name}_ms": latency.std * 1e3}
            plain |= {f"p{percent:g}_{name}_ms": latency.percentile(percent) * 1e3 for percent in percentiles}
        return plain


def _latency(values: Iterable[float]) -> Latency:
    return Latency(tuple(sorted(values)))


def concurrency(spans: Iterable[tuple[float, float]]) -> tuple[list[float], list[int]]:
    """The number of open spans over time: the times of changes, and the number from then on. Ends come before starts at the same time."""
    changes = Counter[float]()
    for start, ended in spans:
        if ended > start:
            changes[start] += 1
            changes[ended] -= 1
    times, counts, count = [], [], 0
    for time in sorted(changes):
        count += changes[time]
        times.append(time)
        counts.append(count)
    return times, counts


def over_time(points: Iterable[tuple[float, float]], width: float, percent: float) -> tuple[list[float], list[float]]:
    """A percentile of values in windows of `width` seconds: the middles of windows that have values, and the percentiles."""
    windows: dict[int, list[float]] = {}
    for time, value in points:
        windows.setdefault(int(time // width), []).append(value)
    ordered = sorted(windows.items())
    return [(window + 0.5) * width for window, _ in ordered], [float(np.percentile(values, percent)) for _, values in ordered]


def mean_over_time(spans: Sequence[tuple[float, float]], width: float) -> tuple[list[float], list[float]]:
    """The mean number of open spans in windows of `width` seconds: the middles of the windows, and the means."""
    last = max((ended for _, ended in spans), default=0.0)
    means = [0.0] * math.ceil(last / width)
    for start, ended in spans:
        for window in range(int(start / width), min(int(ended / width) + 1, len(means))):
            means[window] += max(0.0, min(ended, (window + 1) * width) - max(start, window * width)) / width
    return [(window + 0.5) * width for window in range(len(means))], means
