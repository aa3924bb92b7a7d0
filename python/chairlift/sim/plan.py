"""`plan`: the largest rate of requests that a machine serves within targets, what binds there, and with which settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from chairlift.bench.sweep import search
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim.devices import Device, Profile
from chairlift.sim.devices import device as known
from chairlift.sim.mix import Mix
from chairlift.sim.result import Result
from chairlift.sim.run import machine, run
from chairlift.sim.steps import StepTime

ROOFLINE_ERROR = 0.3
"""The part by which steps are taken to be off that nobody measured: a guess."""

BINDS = 1.25
"""What twice as much of something must bring for it to be what binds."""

_GAIN = 1.05
"""What a setting must bring to be worth a flag."""

_TRIED = ("max_num_batched_tokens", "max_num_seqs")
"""Settings that are tried."""

_FACTORS = (0.125, 0.25, 0.5, 2, 4)
"""Of them, as parts of what they usually are."""

_SMALLEST = 16
"""Tokens of a step that is tried."""

_HALVINGS = 5
"""Of a search's interval, from a factor of two: to 2 %."""

_SECONDS = 120.0
"""Of a spell of traffic, at least: as long as somebody would measure for."""

_WARM_UP = 0.1
"""The part of a spell whose first tokens do not count: the machine is still empty."""

_SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35)
"""Rates whose latencies are told, as parts of the one that was found."""


@dataclass(frozen=True, slots=True)
class Point:
    """A percentile of the times to first tokens and between tokens, in seconds, at so many requests a second."""

    rate: float
    ttft: float
    itl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What `percentile` of a hundred first tokens, and as many times between tokens, must keep, in seconds."""

    ttft: float = 2.0
    itl: float = 0.1
    percentile: float = 95.0

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.itl > 0 and 0 < self.percentile <= 100):
            raise InvalidSetting("targets are times above 0, at a percentile above 0 and at most 100")

    def met(self, point: Point) -> bool:
        """Whether these latencies keep them."""
        return point.ttft <= self.ttft and point.itl <= self.itl


@dataclass(frozen=True, slots=True)
class Band:
    """A rate in requests a second, and between which two it may lie.

    `rate` is the median of what several spells of the same traffic allow. `low` is the unluckiest spell with steps slower by as much as
    they may be off, `high` the luckiest with steps as much faster.
    """

    rate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much a machine serves within `targets`; see `plan`."""

    targets: Targets
    most: Band
    """The largest rate that keeps the targets, with `settings`."""
    settings: dict[str, int]
    """Fields of `EngineConfig` to set; none where nothing does better than what there was."""
    default: Band
    """The largest rate without them."""
    binds: str
    """What ends it: `seats`, `kv` (the cache), `ttft` or `itl` (the target itself), or else `compute`."""
    brings: dict[str, float]
    """The largest rate with twice as much of each of these; for `compute`, with steps that take half as long."""
    points: list[Point]
    """Latencies at rates around it: the medians of all spells."""
    figures: dict[str, float | None]
    """`Result.figures` of a spell at the rate."""
    error: float
    """The part by which steps may be off."""
    spells: int
    """Spells that the range is of."""
    left_out: int
    """Requests of the trace that are longer than the machine takes."""

    def users(self, every: float) -> Band:
        """How many people may send a request every so many seconds each."""
        return Band(*(rate * every for rate in (self.most.rate, self.most.low, self.most.high)))

    def document(self) -> dict[str, Any]:
        """The same as plain data; None for the latency of a request that is refused, which waits for ever."""
        told = asdict(self)
        for point in told["points"]:
            point["ttft"] = point["ttft"] if math.isfinite(point["ttft"]) else None
        return told


def plan(
    mix: Mix,
    targets: Targets | None = None,
    *,
    device: str | Device | Profile,
    model: str | None = None,
    config: EngineConfig | None = None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Plan:
    """Finds the largest rate at which the scheduler keeps the targets, in virtual time, by halving intervals as `bench sweep` does.

    A rate is tried in spells of two minutes or more: long against the targets, so that a queue that grows outgrows them. Sizes of a step
    and numbers of seats that `config` leaves open are tried too, with steps as slow as one of ten may be: what carries most then is chosen.
    What binds is what brings a quarter more when there is twice as much of it. The same arguments give the same plan, to the bit;
    `on_progress` hears about which part is done. Raises InvalidSetting, with the numbers if a request alone misses a target already, or
    what `simulate` raises.
    """
    targets, config = targets or Targets(), config or EngineConfig()
    on = known(device) if isinstance(device, str) else device
    usual, _ = machine(model, on, config)
    fits = mix.fitting(min(usual["max_model_len"], (usual["num_blocks"] - 1) * usual["block_size"]))
    seconds = max(_SECONDS, 20 * targets.ttft + 10 * targets.itl * fits.mean_output)
    # A rate rests on many steps, of which half are closer than the median error; the slowest times between tokens rest on single ones.
    error, slowest = (float(on.errors.get(name, 0.0)) if isinstance(on, Profile) else ROOFLINE_ERROR for name in ("p50", "p90"))
    changes = _changes(config, usual, on.measured.get("most_tokens") if isinstance(on, Profile) else None)
    tick = _Ticks(on_progress, len(changes) + 4 * len(fits.seeds) + len(_MORE) + len(_SHARES))

    def trial(of: EngineConfig, slower: float = 1.0) -> _Trial:
        settings, step = machine(model, on, of)
        return _Trial(fits, targets, seconds, settings, step.times(slower), tick)

    def band(of: EngineConfig, knees: list[float]) -> Band:
        slow, fast = trial(of, 1 + error), trial(of, 1 / (1 + error))
        low = min(slow.most(seed, knee) for seed, knee in zip(fits.seeds, knees, strict=True)) if error else min(knees)
        high = max(fast.most(seed, knee) for seed, knee in zip(fits.seeds, knees, strict=True)) if error else max(knees)
        return Band(statistics.median_low(knees), low, high)

    chosen = _choose(trial, config, changes, 1 + slowest)
    best = trial(chosen)
    knees = best.knees()
    found = band(chosen, knees)
    default = found if chosen == config else band(config, trial(config).knees())
    seed = knees.index(found.rate)
    brings = {name: more(best).most(seed, found.rate) for name, more in _MORE.items()}
    binds = max((name for name in brings if name != "compute"), key=lambda name: brings[name])
    return Plan(
        targets=targets,
        most=found,
        settings={name: value for name in _TRIED if (value := getattr(chosen, name)) != getattr(config, name)},
        default=default,
        binds=binds if brings[binds] >= BINDS * found.rate else "compute",
        brings=brings,
        points=[best.middle(share * found.rate) for share in _SHARES],
        figures=best.run(found.rate, seed).figures(),
        error=error,
        spells=len(fits.seeds),
        left_out=mix.left_out(fits),
    )


@dataclass(frozen=True)
class _Trial:
    """A machine with its settings, on which traffic is tried."""

    mix: Mix
    targets: Targets
    seconds: float
    settings: dict[str, Any]
    step: StepTime
    tick: Callable[[], None]

    def run(self, rate: float, seed: int) -> Result:
        """A spell of traffic."""
        return run(self.mix.spell(rate, self.seconds, seed), self.settings, self.step)

    def point(self, rate: float, seed: int) -> Point:
        """Latencies of a spell."""
        return self._told(rate, self.run(rate, seed), _WARM_UP)

    def middle(self, rate: float) -> Point:
        """The medians of all spells."""
        self.tick()
        points = [self.point(rate, seed) for seed in self.mix.seeds]
        return Point(rate, statistics.median(one.ttft for one in points), statistics.median(one.itl for one in points))

    def keeps(self, rate: float, seed: int) -> bool:
        """Whether a spell keeps the targets, and its queue does not grow."""
        point = self.point(rate, seed)
        return self.targets.met(point) and point.ttft <= self.mix.longest_wait(rate, self.seconds)

    def most(self, seed: int, start: float = 0.0) -> float:
        """The largest rate that does, looked for from `start`; 0 where a request alone misses them."""
        self.tick()
        if not self.targets.met(self.alone):
            return 0.0
        return search(lambda rate: self.keeps(rate, seed), start or self.alone.rate, _HALVINGS) or 0.0

    def knees(self) -> list[float]:
        """The largest rate of each spell."""
        return [self.most(seed) for seed in self.mix.seeds]

    @cached_property
    def alone(self) -> Point:
        """Latencies of requests that never meet, and the rate at which they would follow each other."""
        result = run(self.mix.alone(), self.settings, self.step)
        return self._told(1 / float(result.e2e().mean()), result, 0.0)

    def _told(self, rate: float, result: Result, warm_up: float) -> Point:
        counted = result.requests[result.requests["arrived"] >= warm_up * result.requests["arrived"].max()]
        never = counted["first_token"] < 0
        waited = np.where(never, np.inf, (counted["first_token"] - counted["arrived"]) / 1e6)
        # A request that was refused has waited for ever.
        ttft = np.append(waited, np.full(len(result.refused), np.inf))
        percent = self.targets.percentile
        return Point(rate, float(np.percentile(ttft, percent, method="inverted_cdf")), result.itl(percent) or 0.0)


class _Ticks:
    """Counts parts that are done."""

    def __init__(self, on_progress: Callable[[float], None], parts: int) -> None:
        self._on_progress, self._parts, self._done = on_progress, parts, 0

    def __call__(self) -> None:
        self._on_progress(min(1.0, self._done / self._parts))
        self._done += 1


def _changes(config: EngineConfig, usual: dict[str, Any], largest: int | None) -> list[dict[str, Any]]:
    """Settings to try beside those that there are: sizes of a step, none larger than was measured, and then numbers of seats.

    There are no more seats than tokens of a step.
    """
    fixed = bool(config.max_num_seqs or config.static_batch_size)
    tokens, seats = usual["max_tokens"], usual["max_seqs"]
    changes: list[dict[str, Any]] = []
    for size in (int(factor * tokens) for factor in _FACTORS if not config.max_num_batched_tokens):
        if _SMALLEST <= size <= (largest or size) and not (fixed and size < seats):
            changes.append({"max_num_batched_tokens": size, "max_num_seqs": size if size < seats else config.max_num_seqs})
    counts = (max(1, int(factor * seats)) for factor in _FACTORS if not fixed)
    return [*changes, *({"max_num_seqs": count} for count in counts if count <= tokens)]


def _choose(
    trial: Callable[[EngineConfig, float], _Trial], config: EngineConfig, changes: list[dict[str, Any]], slowest: float
) -> EngineConfig:
    """The settings that carry most with steps as slow as single ones may be, or as they are told where that is too slow for any rate."""
    alone: list[Point] = []
    for slower in dict.fromkeys((slowest, 1.0)):
        best, most = config, 0.0
        for change in ({}, *changes):
            try:
                tried = replace(best, **change)
            except ValueError:  # more seats than the best step has tokens
                continue
            one = trial(tried, slower)
            alone.append(one.alone)
            if most and not one.keeps(_GAIN * most, 0):
                one.tick()
            elif rate := one.most(0, _GAIN * most):
                best, most = tried, rate
        if most:
            return best
    targets = one.targets
    least = min(alone, key=lambda point: max(point.ttft / targets.ttft, point.itl / targets.itl))
    need = [
        f"{flag} {math.ceil(takes * 1e3)}"
        for flag, takes, target in (("--ttft-ms", least.ttft, targets.ttft), ("--itl-ms", least.itl, targets.itl))
        if takes > target
    ]
    if not need:
        raise InvalidSetting(
            "these targets cannot be met: a request alone keeps them, but so many come at the same moment that they are missed however "
            "slowly the trace goes by: ask for more time to first tokens (--ttft-ms), or let requests come at random (--no-self-timed)"
        )
    raise InvalidSetting(
        f"these targets cannot be met: a request alone on this machine takes {least.ttft * 1e3:.0f} ms to its first token and "
        f"{least.itl * 1e3:.0f} ms between two tokens ({targets.percentile:g} of 100 at most): ask for {' and '.join(need)} at least"
    )


def _twice(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Settings with twice as much of one; a step has a token for each seat."""
    more = settings | {name: 2 * settings[name]}
    return more | {"max_tokens": max(more["max_tokens"], more["max_seqs"])}


_MORE: dict[str, Callable[[_Trial], _Trial]] = {
    "compute": lambda of: replace(of, step=of.step.times(0.5)),
    "seats": lambda of: replace(of, settings=_twice(of.settings, "max_seqs")),
    "kv": lambda of: replace(of, settings=_twice(of.settings, "num_blocks")),
    "ttft": lambda of: replace(of, targets=replace(of.targets, ttft=2 * of.targets.ttft)),
    "itl": lambda of: replace(of, targets=replace(of.targets, itl=2 * of.targets.itl)),
}
"""What there may be twice as much of."""
