"""The result of a simulation or of a replayed journal: its requests, samples over time, and figures."""

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
    "draft_tokens",
    "accepted_draft_tokens",
)
"""The columns of a request in the reports of `_core.simulate`. The time in each state follows them."""

_SAMPLE = ("time", "batch", "tokens", "running", "waiting", "blocks", "saturation")
STOP, LENGTH, ERROR, DEADLINE, ABORT = 1, 2, 3, 4, 5
"""Values of the column `finish`."""

_BUCKET = np.dtype([("time", "<i8"), ("count", "<i8")])


class Result:
    """The result of a run.

    `requests` is a structured array in the order in which requests ended, with times in microseconds: `result.requests["ended"]`. Its
    columns are tag (the request's index in the workload), finish (`STOP`, `LENGTH`, `ERROR`, `DEADLINE`, `ABORT`), arrived, started and
    first_token (-1: never), ended, prompt_tokens, cached_tokens, output_tokens, computed_tokens, recomputed_tokens, preemptions, swaps,
    block_us, longest_gap, draft_tokens, accepted_draft_tokens, and the time in each state of docs/scheduling.md. `timeline` is a structured
    array of samples for plots: time, batch (sequences in the step), tokens, running, waiting, blocks in use, and saturation in thousandths.
    Figures cover all steps. With several replicas, `replicas` has a result for each, `requests` covers all, and `timeline` is that of the
    first. `recorded` is set for a recorded run, whose refused requests are unknown.
    """

    def __init__(self, reports: Sequence[Mapping[str, Any]], config: Mapping[str, Any], wall: float, *, recorded: bool = False) -> None:
        first = reports[0]
        row = np.dtype([(name, "<i8") for name in (*_NUMBERS, *first["states"])])
        self.tenants: tuple[str, ...] = tuple(sorted({name for report in reports for name in report["tenants"]}))
        """The sorted names of the tenants whose requests ended."""
        self.tenant: NDArray[np.int64] = np.concatenate([_tenant_numbers(report, self.tenants) for report in reports])
        """The tenant of each of `requests`, as an index into `tenants`."""
        self._service = [(report["service_window"], report["service"]) for report in reports]
        self.config = dict(config)
        """The scheduler's settings, named as in `_core.Scheduler`."""
        self.wall = wall
        """Seconds that the simulation took to run."""
        self.recorded = recorded
        self.state_names: tuple[str, ...] = tuple(first["states"])
        self.requests: NDArray[Any] = np.concatenate([np.frombuffer(report["ended"], row) for report in reports])
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
    def busy(self) -> float:
        """Seconds with a step in flight, summed over the replicas."""
        return float(self._busy) / 1e6

    @property
    def finished(self) -> NDArray[Any]:
        """The requests that finished by a stop condition or their length."""
        return self.requests[np.isin(self.requests["finish"], (STOP, LENGTH))]

    def ttft(self) -> NDArray[np.float64]:
        """Seconds to the first token, for each request that got one."""
        answered = self.requests[self.requests["first_token"] >= 0]
        seconds: NDArray[np.float64] = (answered["first_token"] - answered["arrived"]) / 1e6
        return seconds

    def tpot(self) -> NDArray[np.float64]:
        """Mean seconds between two tokens, for each request that finished with more than one."""
        several = self.finished[self.finished["output_tokens"] > 1]
        seconds: NDArray[np.float64] = (several["ended"] - several["first_token"]) / (several["output_tokens"] - 1) / 1e6
        return seconds

    def e2e(self) -> NDArray[np.float64]:
        """Seconds from arrival to end, for each request that finished."""
        seconds: NDArray[np.float64] = (self.finished["ended"] - self.finished["arrived"]) / 1e6
        return seconds

    def itl(self, percent: float) -> float | None:
        """A percentile of the seconds between two tokens, exact to 0.4 %; None if there are none."""
        return _weighted(self._gaps, percent)

    def step_time(self, percent: float) -> float | None:
        """A percentile of the seconds of a step."""
        return _weighted(self._steps, percent)

    def states(self) -> dict[str, float]:
        """Mean seconds in each state, over all requests that ended. States without time are absent."""
        if not len(self.requests):
            return {}
        means = {name: float(self.requests[name].mean()) / 1e6 for name in self.state_names}
        return {name: mean for name, mean in means.items() if mean > 0}

    def tenant_figures(self) -> dict[str, dict[str, float | None]]:
        """The figures of each tenant. `service` is 1 for each computed prompt token and 2 for each output token."""
        figures = {}
        for number, name in enumerate(self.tenants):
            one = self.requests[self.tenant == number]
            started = one[one["first_token"] >= 0]
            done = one[np.isin(one["finish"], (STOP, LENGTH))]
            figures[name] = {
                "requests": len(one),
                "finished": len(done),
                **_percentiles("ttft", (started["first_token"] - started["arrived"]) / 1e6, 50, 99),
                **_percentiles("end_to_end", (done["ended"] - done["arrived"]) / 1e6, 50, 99),
                "output_tokens": int(one["output_tokens"].sum()),
                "service": int((one["prompt_tokens"] - one["cached_tokens"])[one["started"] >= 0].sum() + 2 * one["output_tokens"].sum()),
                "preemptions": int(one["preemptions"].sum()),
            }
        return figures

    def service(self) -> tuple[float, dict[str, NDArray[np.int64]]]:
        """The width of a window in seconds, and each tenant's service in each window. A replay has none."""
        # Windows start at one second and double in long runs, so those of replicas differ by powers of two.
        widest = max(window for window, _ in self._service)
        totals: dict[str, NDArray[np.int64]] = {}
        for window, tenants in self._service:
            for name, values in tenants.items():
                factor = widest // window
                sums = np.add.reduceat(np.asarray(values, np.int64), np.arange(0, len(values), factor))
                before = totals.get(name, np.zeros(0, np.int64))
                size = max(len(before), len(sums))
                totals[name] = np.pad(before, (0, size - len(before))) + np.pad(sums, (0, size - len(sums)))
        return widest / 1e6, totals

    def figures(self) -> dict[str, float | None]:
        """The figures of the run. Names that end in `_s` are seconds. None is unknown.

        Percentiles are nearest ranks. `batch_mean` (sequences in a step) and `kv_used_mean` (the share of KV blocks that sequences hold)
        are means over the time of all steps of all replicas; `batch_max` and `kv_used_max` are the maxima. All are exact.
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
            "draft_tokens": int(one["draft_tokens"].sum()),
            "accepted_draft_tokens": int(one["accepted_draft_tokens"].sum()),
            "steps": self.steps,
            "step_p50_s": self.step_time(50),
            "step_p99_s": self.step_time(99),
            "span_s": span,
        }

    def document(self) -> dict[str, Any]:
        """The figures, settings, tenants and samples as plain data."""
        window, service = self.service()
        return {
            "config": self.config,
            "figures": self.figures(),
            "states_mean_s": self.states(),
            "stats": self.stats,
            "timeline": {name: self.timeline[name].tolist() for name in _SAMPLE},
            "tenants": self.tenant_figures(),
            "service": {"window_s": window, "tenants": {name: values.tolist() for name, values in service.items()}},
        }


def _tenant_numbers(report: Mapping[str, Any], tenants: Sequence[str]) -> NDArray[np.int64]:
    """The tenant of each request of a report, as an index into `tenants`."""
    indices = np.array([tenants.index(name) for name in report["tenants"]] or [0], np.int64)
    numbers: NDArray[np.int64] = indices[np.frombuffer(report["tenant"], np.int64)]
    return numbers


def _sum(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summed counters of several schedulers."""
    summed = dict(stats[0])
    for name, value in summed.items():
        if isinstance(value, int):
            summed[name] = sum(one[name] for one in stats)
    summed["saturation"] = sum(one["saturation"] for one in stats) / len(stats)
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
