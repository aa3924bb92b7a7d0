"""`plan`: the largest request rate that a machine serves within latency targets, its bottleneck and the best settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from chairlift.bench.sweep import search
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim.devices import Device, Profile
from chairlift.sim.devices import device as known
from chairlift.sim.result import Result
from chairlift.sim.run import longest_request, machine, run
from chairlift.sim.steps import StepTime
from chairlift.sim.workload_spec import WorkloadSpec

ROOFLINE_ERROR = 0.3
"""The relative error assumed for the step times of a device that was not measured."""

BOTTLENECK_GAIN = 1.25
"""The bottleneck is the resource whose doubling raises the rate by at least this factor."""

MAX_ERROR = 0.3
"""The largest relative error of measured step times for which there is a plan."""

MAX_RANGE = 3.0
"""The largest ratio of the ends of a plan's range for which its rate is a result."""

_MIN_GAIN = 1.05
"""The factor by which a setting must raise the rate to be recommended."""

_TUNED = ("max_num_batched_tokens", "max_num_seqs")
"""The settings that are tuned."""

_FACTORS = (0.125, 0.25, 0.5, 2, 4)
"""The values that are tried for them, as multiples of the default."""

_MIN_STEP_TOKENS = 16
"""The smallest step size that is tried."""

BISECTIONS = 5
"""Bisections of a search's interval, from a factor of two down to 2 %."""

_MIN_SECONDS = 120.0
"""The shortest workload that is simulated."""

WARM_UP = 0.1
"""The share of a workload whose TTFT does not count, because the machine is still empty."""

_RATES = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35)
"""The rates whose latencies are reported, as multiples of the capacity."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Point:
    """The targeted percentile of TTFT and ITL, in seconds, at `rate` requests a second."""

    rate: float
    ttft: float
    itl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The largest allowed `percentile` of TTFT and of ITL, in seconds."""

    ttft: float = 2.0
    itl: float = 0.1
    percentile: float = 95.0

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.itl > 0 and 0 < self.percentile <= 100):
            raise InvalidSetting("targets are times above 0, and a percentile above 0 and at most 100")

    def workload_seconds(self, mean_output: float) -> float:
        """The seconds of traffic to simulate, for requests with `mean_output` tokens of output on average."""
        return max(_MIN_SECONDS, 20 * self.ttft + 10 * self.itl * mean_output)

    def met(self, point: Point) -> bool:
        """Whether these latencies meet the targets."""
        return point.ttft <= self.ttft and point.itl <= self.itl


@dataclass(frozen=True, slots=True)
class Band:
    """A rate in requests a second, and its range.

    `rate` is the median of several seeds. `low` is the lowest seed with steps slower by the error of their times, `high` the highest seed
    with steps faster by it.
    """

    rate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The capacity of a machine within `targets`; see `plan`."""

    targets: Targets
    capacity: Band
    """The largest rate that meets the targets, with `settings`."""
    settings: dict[str, int]
    """Recommended fields of `EngineConfig`. Empty if no settings serve more than the given ones."""
    default: Band
    """The largest rate without them."""
    bottleneck: str
    """What limits the rate: `slots`, `kv` (the cache), `ttft` or `itl` (the target), or else `compute`."""
    sensitivity: dict[str, float]
    """The largest rate with twice as much of each of these resources; for `compute`, with steps that take half as long."""
    points: list[Point]
    """Latencies at rates around the capacity: the medians of all seeds."""
    figures: dict[str, float | None]
    """`Result.figures` of one seed at the capacity."""
    error: float
    """The relative error of the step times."""
    seeds: int
    """The number of seeds that were tried."""
    excluded: int
    """Requests of the trace that exceed the longest context."""

    @property
    def conclusive(self) -> bool:
        """Whether the range is narrow enough: if not, only the range is a result."""
        return self.capacity.low > 0 and self.capacity.high <= MAX_RANGE * self.capacity.low

    def users(self, seconds: float) -> Band:
        """The number of users who can each send a request every `seconds` seconds."""
        return Band(*(rate * seconds for rate in (self.capacity.rate, self.capacity.low, self.capacity.high)))

    def document(self) -> dict[str, Any]:
        """The plan as plain data. The latency of a refused request, which is infinite, is None."""
        document = asdict(self) | {"conclusive": self.conclusive}
        for point in document["points"]:
            point["ttft"] = point["ttft"] if math.isfinite(point["ttft"]) else None
        return document


def plan(
    spec: WorkloadSpec,
    targets: Targets | None = None,
    *,
    device: str | Device | Profile,
    model: str | None = None,
    config: EngineConfig | None = None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Plan:
    """Finds the largest rate at which the simulated engine meets the targets, by bisection as in `bench sweep`.

    Each rate is simulated for at least two minutes, long enough for a growing queue to miss the targets. Step sizes and numbers of slots
    that `config` leaves unset are tuned, with pessimistic step times (the 90th percentile of their error). The bottleneck is the resource
    whose doubling raises the rate by a quarter. The same arguments give the same plan, bit for bit. `on_progress` gets the completed
    share, from 0 to 1.

    Raises InvalidSetting if an isolated request already misses a target, with its latencies, if the step times were not measured well
    enough (`step_error`), or whatever `simulate` raises.
    """
    targets, config = targets or Targets(), config or EngineConfig()
    on = known(device)
    usual, _ = machine(model, on, config)
    fits = spec.fitting(longest_request(usual))
    seconds = targets.workload_seconds(fits.mean_output)
    # Throughput averages over many steps: their median error. The tail of ITL depends on single steps: the 90th percentile.
    error, tail_error = step_error(on), step_error(on, "p90")
    changes = candidates(config, usual, on.measured.get("most_tokens") if isinstance(on, Profile) else None)
    progress = Progress(on_progress, len(changes) + 4 * len(fits.seeds) + len(_DOUBLED) + len(_RATES))

    def trial(of: EngineConfig, slowdown: float = 1.0) -> _Trial:
        settings, step = machine(model, on, of)
        return _Trial(fits, targets, seconds, settings, step.times(slowdown), progress)

    tuned = _tune(trial, config, changes, 1 + tail_error)
    best = trial(tuned)
    capacity, seed = best.band(error)
    default = capacity if tuned == config else trial(config).band(error)[0]
    sensitivity = best.sensitivity(capacity.rate, seed)
    return Plan(
        targets=targets,
        capacity=capacity,
        settings={name: value for name in _TUNED if (value := getattr(tuned, name)) != getattr(config, name)},
        default=default,
        bottleneck=_bottleneck(sensitivity, capacity.rate),
        sensitivity=sensitivity,
        points=[best.median_point(share * capacity.rate) for share in _RATES],
        figures=best.run(capacity.rate, seed).figures(),
        error=error,
        seeds=len(fits.seeds),
        excluded=spec.excluded(fits),
    )


@dataclass(frozen=True)
class _Trial:
    """A machine with its settings, on which request rates are tried."""

    spec: WorkloadSpec
    targets: Targets
    seconds: float
    settings: dict[str, Any]
    step: StepTime
    progress: Callable[[], None]

    def run(self, rate: float, seed: int) -> Result:
        """Simulates one workload."""
        return run(self.spec.sample(rate, self.seconds, seed), self.settings, self.step)

    def point(self, rate: float, seed: int) -> Point:
        """The latencies of one workload."""
        return self._point(rate, self.run(rate, seed), WARM_UP)

    def median_point(self, rate: float) -> Point:
        """The median latencies of all seeds."""
        self.progress()
        points = [self.point(rate, seed) for seed in self.spec.seeds]
        return Point(rate, statistics.median(one.ttft for one in points), statistics.median(one.itl for one in points))

    def meets(self, rate: float, seed: int) -> bool:
        """Whether a workload meets the targets and its queue is stable."""
        point = self.point(rate, seed)
        return self.targets.met(point) and point.ttft <= self.spec.max_wait(rate, self.seconds)

    def capacity(self, seed: int, start: float = 0.0) -> float:
        """The largest rate that meets the targets, searched from `start`; 0 if isolated requests miss them."""
        self.progress()
        if not self.targets.met(self.isolated):
            return 0.0
        return search(lambda rate: self.meets(rate, seed), start or self.isolated.rate, BISECTIONS) or 0.0

    def band(self, error: float) -> tuple[Band, int]:
        """The largest rate of all seeds, with its range if step times have a relative `error`, and the seed that has this rate."""
        capacities = [self.capacity(seed) for seed in self.spec.seeds]

        def at(slowdown: float) -> list[float]:
            other = replace(self, step=self.step.times(slowdown))
            return [other.capacity(seed, rate) for seed, rate in zip(self.spec.seeds, capacities, strict=True)]

        band = Band(statistics.median_low(capacities), *ends(capacities, error, at))
        return band, capacities.index(band.rate)

    def sensitivity(self, rate: float, seed: int) -> dict[str, float]:
        """The largest rate with twice as much of each resource: at least `rate`, as a machine need not use all that it has."""
        return {name: max(rate, double(self).capacity(seed, rate)) for name, double in _DOUBLED.items()}

    @cached_property
    def isolated(self) -> Point:
        """The latencies of isolated requests, and the rate at which they would run back to back."""
        result = run(self.spec.isolated(), self.settings, self.step)
        return self._point(1 / float(result.e2e().mean()), result, 0.0)

    def _point(self, rate: float, result: Result, warm_up: float) -> Point:
        return point_of(result, rate, self.targets.percentile, warm_up * result.requests["arrived"].max())


def point_of(result: Result, rate: float, percent: float, since: float) -> Point:
    """The latencies of the requests that arrived at `since` (microseconds) or later. A request without a token waits for ever."""
    counted = result.requests[result.requests["arrived"] >= since]
    unanswered = counted["first_token"] < 0
    waited = np.where(unanswered, np.inf, (counted["first_token"] - counted["arrived"]) / 1e6)
    ttft = np.append(waited, np.full(len(result.refused), np.inf))
    return Point(rate, float(np.percentile(ttft, percent, method="inverted_cdf")), result.itl(percent) or 0.0)


def ends(capacities: Sequence[Number], error: float, at: Callable[[float], Sequence[Number]]) -> tuple[Number, Number]:
    """The lowest capacity with steps slower by `error`, the relative error of their times, and the highest with steps faster by it.

    `at` finds the capacities with steps slower by a factor; `capacities` are those without one.
    """
    return (min(at(1 + error)), max(at(1 / (1 + error)))) if error else (min(capacities), max(capacities))


class Progress:
    """Reports the share of `parts` that are complete; call it at the start of each."""

    def __init__(self, on_progress: Callable[[float], None], parts: int) -> None:
        self._on_progress, self._parts, self._done = on_progress, parts, 0

    def __call__(self) -> None:
        """Begins the next part."""
        self._on_progress(min(1.0, self._done / self._parts))
        self._done += 1


def step_error(on: Device | Profile, percentile: str = "p50") -> float:
    """The relative error of a device's step times: that of a roofline, or a percentile of a profile's errors.

    The difference between the repeats of a measurement is an error too. Raises InvalidSetting if the median error is above `MAX_ERROR`.
    """
    if not isinstance(on, Profile):
        return ROOFLINE_ERROR
    usual, spread = on.errors.get("p50", 0.0), on.errors.get("spread", 0.0)
    if max(usual, spread) > MAX_ERROR:
        differed = f", and repeated measurements differed by {spread:.0%}" if spread else ""
        raise InvalidSetting(
            f"the measurements of {on.name} do not suffice for a plan: half of its step times are off by more than {usual:.0%}{differed}. "
            f"End other programs and measure again for longer: chairlift calibrate --seconds 300 -o FILE"
        )
    return float(max(on.errors.get(percentile, 0.0), spread))


def candidates(config: EngineConfig, usual: dict[str, Any], measured_tokens: int | None) -> list[dict[str, Any]]:
    """Settings to try: step sizes up to the largest measured one, then numbers of slots. A step has a token for each slot."""
    fixed = bool(config.max_num_seqs or config.static_batch_size)
    tokens, slots = usual["max_num_batched_tokens"], usual["max_num_seqs"]
    changes: list[dict[str, Any]] = []
    for size in (int(factor * tokens) for factor in _FACTORS if not config.max_num_batched_tokens):
        if _MIN_STEP_TOKENS <= size <= (measured_tokens or size) and not (fixed and size < slots):
            changes.append({"max_num_batched_tokens": size, "max_num_seqs": size if size < slots else config.max_num_seqs})
    counts = (max(1, int(factor * slots)) for factor in _FACTORS if not fixed)
    return [*changes, *({"max_num_seqs": count} for count in counts if count <= tokens)]


def _tune(
    trial: Callable[[EngineConfig, float], _Trial], config: EngineConfig, changes: list[dict[str, Any]], slowdown: float
) -> EngineConfig:
    """The settings with the largest capacity with steps slower by `slowdown`, or without if no rate meets the targets then."""
    isolated: list[Point] = []
    for factor in dict.fromkeys((slowdown, 1.0)):
        best, capacity = config, 0.0
        for change in ({}, *changes):
            try:
                candidate = replace(best, **change)
            except ValueError:  # more slots than tokens of a step
                continue
            one = trial(candidate, factor)
            isolated.append(one.isolated)
            if capacity and not one.meets(_MIN_GAIN * capacity, 0):
                one.progress()
            elif rate := one.capacity(0, _MIN_GAIN * capacity):
                best, capacity = candidate, rate
        if capacity:
            return best
    raise InvalidSetting(_unreachable(one.targets, isolated, timed=one.spec.timed))


def _unreachable(targets: Targets, isolated: list[Point], *, timed: bool) -> str:
    """The message for targets that no rate meets."""
    best = min(isolated, key=lambda point: max(point.ttft / targets.ttft, point.itl / targets.itl))
    needed = [
        f"{flag} {math.ceil(latency * 1e3)}"
        for flag, latency, target in (("--ttft-ms", best.ttft, targets.ttft), ("--itl-ms", best.itl, targets.itl))
        if latency > target
    ]
    if not needed:
        bursts, remedy = (
            ("the trace has", "random arrival times (--no-self-timed)") if timed else ("the arrivals have", "a larger --burstiness")
        )
        return (
            f"these targets cannot be met: isolated requests meet them, but {bursts} bursts that miss them at any rate. "
            f"Use a larger --ttft-ms, or {remedy}"
        )
    return (
        f"these targets cannot be met: p{targets.percentile:g} of isolated requests on this machine is {best.ttft * 1e3:.0f} ms of TTFT "
        f"and {best.itl * 1e3:.0f} ms of ITL. Use at least {' and '.join(needed)}"
    )


def _bottleneck(sensitivity: dict[str, float], rate: float) -> str:
    """The resource whose doubling raises the rate most; `compute` if none raises it much."""
    most = max((name for name in sensitivity if name != "compute"), key=lambda name: sensitivity[name])
    return most if sensitivity[most] >= BOTTLENECK_GAIN * rate else "compute"


def doubled(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """`settings` with twice as much of one. A step has a token for each slot."""
    more = settings | {name: 2 * settings[name]}
    return more | {"max_num_batched_tokens": max(more["max_num_batched_tokens"], more["max_num_seqs"])}


_DOUBLED: dict[str, Callable[[_Trial], _Trial]] = {
    "compute": lambda of: replace(of, step=of.step.times(0.5)),
    "slots": lambda of: replace(of, settings=doubled(of.settings, "max_num_seqs")),
    "kv": lambda of: replace(of, settings=doubled(of.settings, "num_kv_blocks")),
    "ttft": lambda of: replace(of, targets=replace(of.targets, ttft=2 * of.targets.ttft)),
    "itl": lambda of: replace(of, targets=replace(of.targets, itl=2 * of.targets.itl)),
}
"""The trial with twice as much of each resource."""
