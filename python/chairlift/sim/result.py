"""What came of requests: of a simulation's, or of those that a journal recorded."""

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

_SAMPLE = ("time", "batch", "tokens", "running", "waiting", "blocks", "saturation")
STOP, LENGTH, ERROR, DEADLINE, ABORT = 1, 2, 3, 4, 5
"""Finishes of requests, as numbers."""

_BUCKET = np.dtype([("time", "<i8"), ("count", "<i8")])


class Result:
    """What came of a workload: `requests` in the order in which they ended, times in microseconds, and the machine over time.

    `requests` and `timeline` are structured arrays: `result.requests["ended"]`. A request has tag (its place in the workload), finish
    (`STOP`, `LENGTH`, `ERROR`, `DEADLINE`, `ABORT`), arrived, started and first_token (-1: never), ended, prompt_tokens, cached_tokens,
    output_tokens, computed_tokens, recomputed_tokens, preemptions, swaps, block_us, longest_gap, and its time by each cause of
    docs/scheduling.md. The timeline has time, batch (sequences in the step), tokens, running, waiting, blocks in use, and saturation in
    thousandths: samples, for plots; the figures are of all steps. With several replicas, `replicas` has one result for each, and this
    one has all requests and the first's timeline. `recorded`: this is what really happened, and who was refused is not known.
    """

    def __init__(self, reports: Sequence[Mapping[str, Any]], config: Mapping[str, Any], wall: float, *, recorded: bool = False) -> None:
        first = reports[0]
        line = np.dtype([(name, "<i8") for name in (*_NUMBERS, *first["states"])])
        self.tenants: tuple[str, ...] = tuple(sorted({name for report in reports for name in report["tenants"]}))
        """The tenants of the requests that ended, by name."""
        self.tenant: NDArray[np.int64] = np.concatenate([_tenant_numbers(report, self.tenants) for report in reports])
        """Whose each of `requests` is: its place in `tenants`."""
        self._service = [(report["service_window"], report["service"]) for report in reports]
        self.config = dict(config)
        """The scheduler's settings, by the names of `_core.Scheduler`."""
        self.wall = wall
        """Seconds that the simulation itself took."""
        self.recorded = recorded
        self.cause_names: tuple[str, ...] = tuple(first["states"])
        self.requests: NDArray[Any] = np.concatenate([np.frombuffer(report["ended"], line) for report in reports])
        self.refused: list[int] = [tag for report in reports for tag in report["refused"]]
        self.steps = sum(report["steps"] for report in reports)
        self.decisions = sum(report["chunks"] for report in reports)
        self.timeline: NDArray[Any] = np.frombuffer(first["timeline"], np.dtype([(name, "<i8") for name in _SAMPLE]))
        self.stats = _sum([report["stats"] for report in reports])
        busy, batch, blocks, most_batch, most_blocks = zip(*(report["sums"] for report in reports), strict=True)
        self._busy, self._batch, self._blocks = sum(busy), sum(batch), sum(blocks)
        self._most_batch, self._most_blocks = max(most_batch), max(most_blocks)
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

    def causes(self) -> dict[str, float]:
        """Seconds by cause, the mean of all requests that ended; causes that took no time are left out."""
        if not len(self.requests):
            return {}
        means = {name: float(self.requests[name].mean()) / 1e6 for name in self.cause_names}
        return {name: mean for name, mean in means.items() if mean > 0}

    def tenant_figures(self) -> dict[str, dict[str, float | None]]:
        """The numbers by which tenants are compared, for each tenant: `service` counts 1 a computed prompt token and 2 an output token."""
        told = {}
        for number, name in enumerate(self.tenants):
            one = self.requests[self.tenant == number]
            started = one[one["first_token"] >= 0]
            done = one[np.isin(one["finish"], (STOP, LENGTH))]
            told[name] = {
                "requests": len(one),
                "finished": len(done),
                **_percentiles("ttft", (started["first_token"] - started["arrived"]) / 1e6, 50, 99),
                **_percentiles("end_to_end", (done["ended"] - done["arrived"]) / 1e6, 50, 99),
                "output_tokens": int(one["output_tokens"].sum()),
                "service": int((one["prompt_tokens"] - one["cached_tokens"])[one["started"] >= 0].sum() + 2 * one["output_tokens"].sum()),
                "preemptions": int(one["preemptions"].sum()),
            }
        return told

    def service(self) -> tuple[float, dict[str, NDArray[np.int64]]]:
        """Seconds of a window of time, and the service that each tenant was given in each; none is known of a replay."""
        # Windows are a second, doubled as often as a long run needs: those of replicas differ by powers of two.
        widest = max(window for window, _ in self._service)
        given: dict[str, NDArray[np.int64]] = {}
        for window, tenants in self._service:
            for name, values in tenants.items():
                each = widest // window
                sums = np.add.reduceat(np.asarray(values, np.int64), np.arange(0, len(values), each))
                before = given.get(name, np.zeros(0, np.int64))
                size = max(len(before), len(sums))
                given[name] = np.pad(before, (0, size - len(before))) + np.pad(sums, (0, size - len(sums)))
        return widest / 1e6, given

    def figures(self) -> dict[str, float | None]:
        """The numbers by which runs are compared: names that end in `_s` are seconds; None for what is not known.

        Percentiles are nearest ranks. `batch_mean` (sequences in a step) and `kv_used_mean` (the part of the KV cache that sequences hold)
        are averages over the time in which there was a step, of all replicas, and `batch_max` and `kv_used_max` the most of any: exact, of
        every step.
        """
        one, done, span = self.requests, self.finished, self.span
        started = np.where(one["started"] < 0, one["ended"], one["started"])
        unfinished = sum(self.stats[name] for name in ("running", "waiting", "swapped"))
        cache = self.stats["total_blocks"] / len(self.replicas)
        return {
            "requests": len(one) + len(self.refused) + unfinished,
            "finished": len(done),
            "missed_deadline": int((one["finish"] == DEADLINE).sum()),
            "refused": None if self.recorded else len(self.refused),
            "aborted": int((one["finish"] == ABORT).sum()),
            "failed": int((one["finish"] == ERROR).sum()),
            "unfinished": unfinished,
            **_percentiles("ttft", self.ttft(), 50, 90, 99),
            **{f"itl_p{percent}_s": self.itl(percent) for percent in (50, 90, 99)},
            **_percentiles("time_per_output_token", self.tpot(), 50, 90, 99),
            **_percentiles("queue", (started - one["arrived"]) / 1e6, 50, 99),
            **_percentiles("end_to_end", self.e2e(), 50, 90, 99),
            "requests_per_s": _ratio(len(done), span),
            "prompt_tokens_per_s": _ratio(int(one["prompt_tokens"].sum()), span),
            "tokens_per_s": _ratio(self.stats["generated_tokens"], span),
            "batch_mean": _ratio(self._batch, self._busy),
            "batch_max": self._most_batch,
            "kv_used_mean": _ratio(self._blocks, self._busy * cache),
            "kv_used_max": _ratio(self._most_blocks, cache),
            "prefix_hit_share": _ratio(self.stats["prefix_hits"], self.stats["prefix_queries"]),
            "preemptions_recompute": self.stats["preemptions_recompute"],
            "preemptions_swap": self.stats["preemptions_swap"],
            "recomputed_tokens": self.stats["recomputed_tokens"],
            "steps": self.steps,
            "step_p50_s": self.step_time(50),
            "step_p99_s": self.step_time(99),
            "span_s": span,
        }

    def document(self) -> dict[str, Any]:
        """The numbers as plain data, with the settings, the tenants, and the machine over time."""
        window, service = self.service()
        return {
            "config": self.config,
            "figures": self.figures(),
            "causes_mean_s": self.causes(),
            "stats": self.stats,
            "timeline": {name: self.timeline[name].tolist() for name in _SAMPLE},
            "tenants": self.tenant_figures(),
            "service": {"window_s": window, "tenants": {name: values.tolist() for name, values in service.items()}},
        }


def _tenant_numbers(report: Mapping[str, Any], tenants: Sequence[str]) -> NDArray[np.int64]:
    """Whose each request of a report is, by place in `tenants`."""
    places = np.array([tenants.index(name) for name in report["tenants"]] or [0], np.int64)
    numbers: NDArray[np.int64] = places[np.frombuffer(report["tenant"], np.int64)]
    return numbers


def _sum(many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counters of several schedulers together."""
    summed = dict(many[0])
    for name, value in summed.items():
        if isinstance(value, int):
            summed[name] = sum(one[name] for one in many)
    summed["saturation"] = sum(one["saturation"] for one in many) / len(many)
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
