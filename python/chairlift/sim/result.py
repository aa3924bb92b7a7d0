"""The result of a simulation or of a replayed journal: its requests, samples over time, and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import InvalidSetting
from chairlift.sim import groups
from chairlift.sim.groups import ABORT, DEADLINE, ERROR, GROUPS, percentiles

if TYPE_CHECKING:
    from chairlift import _core

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
_BUCKET = np.dtype([("time", "<i8"), ("count", "<i8")])


class Result:
    """The result of a run.

    `requests` is a structured array in the order in which requests ended, with times in microseconds: `result.requests["ended"]`. Its
    columns are tag (the request's index in the workload), finish (`STOP`, `LENGTH`, `ERROR`, `DEADLINE`, `ABORT`), arrived, started and
    first_token (-1: never), ended, prompt_tokens, cached_tokens, output_tokens, computed_tokens, recomputed_tokens, preemptions, swaps,
    block_us, longest_gap, draft_tokens, accepted_draft_tokens, and the time in each state of docs/scheduling.md. `timeline` is a structured
    array of samples for plots: time, batch (sequences in the step), tokens, running, waiting, blocks in use, and saturation in thousandths.
    Figures cover all steps. With several replicas, `replicas` has a result for each, `requests` covers all, and `timeline` is that of the
    first. `recorded` is set for a recorded run, whose refused requests are unknown. `weights` are those of tenants, 1 by default.
    `policy_failure` is what the policy raised, if it is one in Python and failed: the order of arrival took its place.
    """

    def __init__(
        self,
        reports: Sequence[_core.Report],
        config: Mapping[str, Any],
        wall: float,
        *,
        recorded: bool = False,
        weights: Mapping[str, int] | None = None,
        policy_failure: str | None = None,
    ) -> None:
        first = reports[0]
        self._labels = {group: np.concatenate([labels(report, group) for report in reports]) for group in GROUPS}
        self._weights = weights or {}
        self._service = [(report["service_window"], report["service"]) for report in reports]
        self.config = dict(config)
        """The scheduler's settings, named as in `_core.Scheduler`."""
        self.wall = wall
        """Seconds that the simulation took to run."""
        self.recorded = recorded
        self.policy_failure = policy_failure
        self.state_names: tuple[str, ...] = tuple(first["states"])
        self.requests: NDArray[Any] = np.concatenate([ended(report) for report in reports])
        self.refused: list[int] = [tag for report in reports for tag, _ in report["refused"]]
        self.refused_for: Mapping[str, int] = Counter(reason for report in reports for _, reason in report["refused"])
        """The number of refused requests by reason, a key of `table.REFUSALS`."""
        self.steps = sum(report["steps"] for report in reports)
        self.decisions = sum(report["chunks"] for report in reports)
        self.timeline: NDArray[Any] = np.frombuffer(first["timeline"], np.dtype([(name, "<i8") for name in _SAMPLE]))
        self.stats = _sum([report["stats"] for report in reports])
        busy, batch, blocks, max_batch, max_blocks = zip(*(report["sums"] for report in reports), strict=True)
        self._busy, self._batch, self._blocks = sum(busy), sum(batch), sum(blocks)
        self._max_batch, self._max_blocks = max(max_batch), max(max_blocks)
        self._gaps = np.concatenate([np.frombuffer(report["gaps"], _BUCKET) for report in reports])
        self._steps = np.concatenate([np.frombuffer(report["step_times"], _BUCKET) for report in reports])
        self.replicas = [self]
        if len(reports) > 1:
            self.replicas = [Result([report], config, wall, weights=weights, policy_failure=policy_failure) for report in reports]

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
        return groups.finished(self.requests)

    def ttft(self) -> NDArray[np.float64]:
        """Seconds to the first token, for each request that got one."""
        return groups.ttft(self.requests)

    def tpot(self) -> NDArray[np.float64]:
        """Mean seconds between two tokens, for each request that finished with more than one."""
        return groups.tpot(self.requests)

    def e2e(self) -> NDArray[np.float64]:
        """Seconds from arrival to end, for each request that finished."""
        return groups.e2e(self.requests)

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

    def labels(self, group: str) -> NDArray[Any]:
        """The tenant, session or tier of each of `requests`; "" for none. A session's name begins with its tenant's, if that has one."""
        return self._labels[group]

    def grouped(self, group: str) -> dict[str, dict[str, float | None]]:
        """The figures of each tenant, session or tier: see `groups.figures`. Requests without a session are not in any."""
        labels = self.labels(group)
        named = labels != "" if group == "session" else np.ones(len(labels), bool)
        return groups.grouped(self.requests[named], labels[named])

    def fairness(self) -> dict[str, float | None]:
        """Jain's index of the tenants' service by weight, and the largest gap in service between two tenants that both wait (VTC's).

        The gap is unknown in a replay, and with several replicas.
        """
        service = {name: figures["service"] or 0 for name, figures in self.grouped("tenant").items()}
        window, over_time = self.service()
        gap = groups.service_gap(over_time, window, self.labels("tenant"), self.requests, self._weights)
        return {
            "jain_index": groups.jain([amount / self._weights.get(name, 1) for name, amount in service.items()]),
            "service_gap": gap if over_time and len(self.replicas) == 1 else None,
        }

    def to_pandas(self, group: str | None = None) -> Any:
        """The requests as a pandas data frame: the columns of `requests`, tenant, session and tier.

        With a `group` (tenant, session or tier) a row has the figures of one of these instead (`grouped`). Raises InvalidSetting without
        pandas.
        """
        try:
            pandas = import_module("pandas")  # not a dependency
        except ImportError:
            raise InvalidSetting("to_pandas needs pandas: pip install pandas") from None
        if group is not None:
            return pandas.DataFrame.from_dict(self.grouped(group), orient="index")
        names = self.requests.dtype.names or ()
        return pandas.DataFrame({name: self.requests[name] for name in names} | self._labels)

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
            **percentiles("ttft", self.ttft(), 50, 90, 99),
            **{f"itl_p{percent}_s": self.itl(percent) for percent in (50, 90, 99)},
            **percentiles("time_per_output_token", self.tpot(), 50, 90, 99),
            **percentiles("queue", (started - one["arrived"]) / 1e6, 50, 99),
            **percentiles("end_to_end", self.e2e(), 50, 90, 99),
            "requests_per_s": _ratio(len(done), span),
            "prompt_tokens_per_s": _ratio(int(one["prompt_tokens"].sum()), span),
            "tokens_per_s": _ratio(self.stats["generated_tokens"], span),
            "batch_mean": _ratio(self._batch, self._busy),
            "batch_max": self._max_batch,
            "kv_used_mean": _ratio(self._blocks, self._busy * cache),
            "kv_used_max": _ratio(self._max_blocks, cache),
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
            "refused_for": dict(self.refused_for),
            "policy_failure": self.policy_failure,
            **{f"{group}s": self.grouped(group) for group in GROUPS},
            "fairness": self.fairness(),
            "service": {"window_s": window, "tenants": {name: values.tolist() for name, values in service.items()}},
        }


def ended(report: _core.Ended) -> NDArray[Any]:
    """The requests of a report: see `Result.requests`."""
    return np.frombuffer(report["ended"], np.dtype([(name, "<i8") for name in (*_NUMBERS, *report["states"])]))


def labels(report: Mapping[str, Any], group: str) -> NDArray[Any]:
    """The tenant, session or tier of a report's requests: see `Result.labels`."""
    # The last name is that of number -1.
    names = np.array([*report[f"{group}s"], ""], object)[np.frombuffer(report[group], np.int64)]
    if group == "session":
        tenants = labels(report, "tenant")
        both = (names != "") & (tenants != "")
        names[both] = tenants[both] + "/" + names[both]
    return names


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


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
