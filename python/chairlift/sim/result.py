"""What came of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBERS = (
    "tag",
    "finish",
    "arrived",
    "started",
    "first_token",
    "ended",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "preemptions",
    "swaps",
    "block_us",
    "longest_gap",
)
"""The numbers of a request, as `_core.simulate` gives them; its times by cause come after them."""

_SAMPLE = ("time", "batch", "tokens", "running", "waiting", "blocks")
STOP, LENGTH, DEADLINE = 1, 2, 4
"""Finishes of requests, as numbers."""

_BUCKET = np.dtype([("time", "<i8"), ("count", "<i8")])


class Result:
    """What came of a workload: `requests` in the order in which they ended, times in microseconds, and the machine over time.

    `requests` and `timeline` are structured arrays: `result.requests["ended"]`. A request has tag (its place in the workload), finish
    (`STOP`, `LENGTH`, `DEADLINE`), arrived, started and first_token (-1: never), ended, prompt_tokens, cached_tokens, output_tokens,
    computed_tokens, recomputed_tokens, preemptions, swaps, block_us, longest_gap, and its time by each cause of docs/scheduling.md. The
    timeline has time, batch (sequences in the step), tokens, running, waiting, and blocks in use. With several replicas, `replicas` has
    one result for each, and this one has all requests and the first's timeline.
    """

    def __init__(self, reports: Sequence[Mapping[str, Any]], config: Mapping[str, Any], wall: float) -> None:
        first = reports[0]
        line = np.dtype([(name, "<i8") for name in (*_NUMBERS, *first["causes"])])
        self.config = dict(config)
        """The scheduler's settings, by the names of `_core.Scheduler`."""
        self.wall = wall
        """Seconds that the simulation itself took."""
        self.cause_names: tuple[str, ...] = tuple(first["causes"])
        self.requests: NDArray[Any] = np.concatenate([np.frombuffer(report["ended"], line) for report in reports])
        self.refused: list[int] = [tag for report in reports for tag in report["refused"]]
        self.steps = sum(report["steps"] for report in reports)
        self.decisions = sum(report["chunks"] for report in reports)
        self.timeline: NDArray[Any] = np.frombuffer(first["timeline"], np.dtype([(name, "<i8") for name in _SAMPLE]))
        self.stats = _sum([report["stats"] for report in reports])
        self._gaps = np.concatenate([np.frombuffer(report["gaps"], _BUCKET) for report in reports])
        self._steps = np.concatenate([np.frombuffer(report["step_times"], _BUCKET) for report in reports])
        self.replicas = [Result([report], config, wall) for report in reports] if len(reports) > 1 else [self]

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last end."""
        if not len(self.requests):
            return 0.0
        return float(self.requests["ended"].max() - self.requests["arrived"].min()) / 1e6

    @property
    def finished(self) -> NDArray[Any]:
        """The requests that came to their own end."""
        return self.requests[np.isin(self.requests["finish"], (STOP, LENGTH))]

    def ttft(self) -> NDArray[np.float64]:
        """Seconds to the first token of each request that got one."""
        told = self.requests[self.requests["first_token"] >= 0]
        seconds: NDArray[np.float64] = (told["first_token"] - told["arrived"]) / 1e6
        return seconds

    def tpot(self) -> NDArray[np.float64]:
        """Seconds between two tokens, the mean of each request that finished with more than one."""
        told = self.finished[self.finished["output_tokens"] > 1]
        seconds: NDArray[np.float64] = (told["ended"] - told["first_token"]) / (told["output_tokens"] - 1) / 1e6
        return seconds

    def e2e(self) -> NDArray[np.float64]:
        """Seconds from arrival to end of each request that finished."""
        seconds: NDArray[np.float64] = (self.finished["ended"] - self.finished["arrived"]) / 1e6
        return seconds

    def itl(self, percent: float) -> float | None:
        """Seconds between two tokens below which so many percent of all such times lie; None of nothing. True to 0.4 %."""
        return _weighted(self._gaps, percent)

    def step_time(self, percent: float) -> float | None:
        """The same for what steps took."""
        return _weighted(self._steps, percent)

    def good(self, *, ttft: float | None = None, tpot: float | None = None, e2e: float | None = None) -> NDArray[np.bool_]:
        """Which of `requests` finished within these seconds."""
        one = self.requests
        met = np.isin(one["finish"], (STOP, LENGTH))
        if ttft is not None:
            met &= one["first_token"] - one["arrived"] <= ttft * 1e6
        if tpot is not None:
            met &= one["ended"] - one["first_token"] <= tpot * 1e6 * np.maximum(1, one["output_tokens"] - 1)
        if e2e is not None:
            met &= one["ended"] - one["arrived"] <= e2e * 1e6
        return met

    def causes(self) -> dict[str, float]:
        """Seconds by cause, the mean of all requests that ended; causes that took no time are left out."""
        if not len(self.requests):
            return {}
        means = {name: float(self.requests[name].mean()) / 1e6 for name in self.cause_names}
        return {name: mean for name, mean in means.items() if mean > 0}

    def figures(self) -> dict[str, float | None]:
        """The numbers by which runs are compared: names that end in `_s` are seconds; None for what is not known.

        Those that `chairlift replay` has too have the same names. Percentiles are nearest ranks.
        """
        one, done, span = self.requests, self.finished, self.span
        started = np.where(one["started"] < 0, one["ended"], one["started"])
        busy = self.timeline["batch"][self.timeline["batch"] > 0]
        return {
            "requests": len(one) + len(self.refused),
            "finished": len(done),
            "missed_deadline": int((one["finish"] == DEADLINE).sum()),
            "refused": len(self.refused),
            **_percentiles("ttft", self.ttft(), 50, 90, 99),
            **{f"itl_p{percent}_s": self.itl(percent) for percent in (50, 90, 99)},
            **_percentiles("time_per_output_token", self.tpot(), 50, 90, 99),
            **_percentiles("queue", (started - one["arrived"]) / 1e6, 50, 99),
            **_percentiles("end_to_end", self.e2e(), 50, 90, 99),
            "requests_per_s": _ratio(len(done), span),
            "prompt_tokens_per_s": _ratio(int(one["prompt_tokens"].sum()), span),
            "tokens_per_s": _ratio(self.stats["generated_tokens"], span),
            "batch_mean": float(busy.mean()) if len(busy) else None,
            "kv_used_max": _ratio(int(self.timeline["blocks"].max(initial=0)), self.stats["total_blocks"] / len(self.replicas)),
            "prefix_hit_share": _ratio(self.stats["prefix_hits"], self.stats["prefix_queries"]),
            "preemptions_recompute": self.stats["preemptions_recompute"],
            "preemptions_swap": self.stats["preemptions_swap"],
            "recomputed_tokens": self.stats["recomputed_tokens"],
            "steps": self.steps,
            "step_p50_s": self.step_time(50),
            "step_p99_s": self.step_time(99),
            "span_s": span,
        }


def _sum(many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counters of several schedulers together."""
    summed = dict(many[0])
    for name, value in summed.items():
        if isinstance(value, int):
            summed[name] = sum(one[name] for one in many)
    return summed


def _weighted(buckets: NDArray[Any], percent: float) -> float | None:
    if not len(buckets):
        return None
    ordered = np.sort(buckets, order="time")
    below = np.cumsum(ordered["count"])
    rank = int(np.searchsorted(below, np.ceil(below[-1] * percent / 100)))
    return float(ordered["time"][min(rank, len(ordered) - 1)]) / 1e6


def _percentiles(name: str, values: NDArray[Any], *percents: int) -> dict[str, float | None]:
    if not len(values):
        return {f"{name}_p{percent}_s": None for percent in percents}
    return {f"{name}_p{percent}_s": float(np.percentile(values, percent, method="inverted_cdf")) for percent in percents}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
