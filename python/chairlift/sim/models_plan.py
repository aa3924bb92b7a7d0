"""`plan_models`: the largest request rate at which every model of a machine meets the latency targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from chairlift.bench.sweep import search
from chairlift.errors import InvalidSetting
from chairlift.sim.devices import Device, Profile
from chairlift.sim.models import Machine, SharedMachine, SharedModel, loaded, numbered
from chairlift.sim.plan import BISECTIONS, WARM_UP, Band, Point, Progress, Targets, ends, point_of, step_error
from chairlift.sim.workload_spec import WorkloadSpec

_STEP = 2 ** (1 / 2**BISECTIONS)
"""The factor between the largest rate that meets the targets and the smallest one that was seen to miss them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsPlan:
    """The capacity of a machine with several models within `targets`; see `plan_models`."""

    targets: Targets
    capacity: Band
    """The largest rate of all requests together that meets the targets."""
    figures: Mapping[str, Mapping[str, float | None]]
    """`ModelsResult.figures` of one seed at the capacity."""
    points: Mapping[str, Point]
    """The latencies of each model at the capacity, of the same seed, with the model's own rate."""
    limit: tuple[str, str]
    """The model that misses a target at the next higher rate, and the target: `ttft` or `itl`."""
    error: float
    """The relative error of the step times."""
    excluded: int
    """Requests of the trace that exceed their model's longest context."""

    def document(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)


def plan_models(
    spec: WorkloadSpec,
    models: Sequence[SharedModel],
    targets: Targets | None = None,
    *,
    device: Machine,
    on_progress: Callable[[float], None] = lambda done: None,
) -> ModelsPlan:
    """Finds the largest rate of a trace's requests at which each model meets the targets, as `plan` does for one model.

    `spec` has a trace, whose requests name their models: the models' shares of the requests stay as they are. Settings are not tuned. The
    same arguments give the same plan, bit for bit. Raises InvalidSetting if isolated requests already miss a target, or whatever
    `simulate_models` raises.
    """
    if spec.trace is None:
        raise InvalidSetting("several models need a --trace whose requests name them")
    targets = targets or Targets()
    on = loaded(device)
    machine, error = SharedMachine.of(models, on), _error(on)
    own = WorkloadSpec(trace=numbered(spec.trace, models), timed=spec.timed, burstiness=spec.burstiness)
    fits = own.fitting(*machine.longest)
    seconds = targets.workload_seconds(fits.mean_output)
    trial = _Trial(fits, targets, seconds, machine, Progress(on_progress, (3 if error else 1) * len(fits.seeds)))
    trial.check()
    capacities: list[float] = []
    for seed in fits.seeds:
        capacities.append(trial.capacity(seed, capacities[0] if capacities else 1.0))
    rate = statistics.median_low(capacities)
    if not rate:
        raise InvalidSetting("these targets cannot be met: isolated requests meet them, but those of the trace miss them at any rate")

    def at(slowdown: float) -> list[float]:
        other = replace(trial, machine=machine.times(slowdown))
        return [other.capacity(seed, one) for seed, one in zip(fits.seeds, capacities, strict=True)]

    low, high = ends(capacities, error, at)
    seed = capacities.index(rate)
    result = machine.run(fits.sample(rate, seconds, seed))
    return ModelsPlan(
        targets=targets,
        capacity=Band(rate, low, high),
        figures=result.figures(),
        points=trial.points(rate, seed),
        limit=trial.limit(rate * _STEP, seed),
        error=error,
        excluded=own.excluded(fits),
    )


@dataclass(frozen=True)
class _Trial:
    """A machine, on which request rates are tried."""

    spec: WorkloadSpec
    targets: Targets
    seconds: float
    machine: SharedMachine
    progress: Progress

    def points(self, rate: float, seed: int) -> dict[str, Point]:
        """The latencies of each model with requests."""
        workload = self.spec.sample(rate, self.seconds, seed)
        since = WARM_UP * float(workload.column("arrival_us")[-1])
        number, found = workload.column("model"), self.machine.run(workload).results
        counted = [np.count_nonzero((number == at) & (workload.column("arrival_us") >= since)) for at in range(len(found))]
        # A model whose few requests all came early counts with these.
        return {
            name: point_of(result, rate * float((number == at).mean()), self.targets.percentile, since if counted[at] else 0.0)
            for at, (name, result) in enumerate(found.items())
            if (number == at).any()
        }

    def meets(self, rate: float, seed: int) -> bool:
        """Whether each model meets the targets and its queue is stable."""
        longest = self.spec.max_wait(rate, self.seconds)
        return all(self.targets.met(point) and point.ttft <= longest for point in self.points(rate, seed).values())

    def capacity(self, seed: int, start: float) -> float:
        """The largest rate that meets the targets; 0 if none does."""
        self.progress()
        return search(lambda rate: self.meets(rate, seed), start or 1.0, BISECTIONS) or 0.0

    def limit(self, rate: float, seed: int) -> tuple[str, str]:
        """The model that is furthest beyond a target, and the target."""
        longest = min(self.targets.ttft, self.spec.max_wait(rate, self.seconds))
        beyond = {
            (name, target): value
            for name, point in self.points(rate, seed).items()
            for target, value in (("ttft", point.ttft / longest), ("itl", point.itl / self.targets.itl))
        }
        return max(beyond, key=lambda of: beyond[of])

    def check(self) -> None:
        """Raises InvalidSetting if isolated requests miss a target."""
        for name, result in self.machine.run(self.spec.isolated()).results.items():
            if not len(result.requests) and not result.refused:
                continue
            point = point_of(result, 0.0, self.targets.percentile, 0.0)
            if not self.targets.met(point):
                raise InvalidSetting(
                    f"these targets cannot be met: p{self.targets.percentile:g} of isolated requests of {name} is "
                    f"{point.ttft * 1e3:.0f} ms of TTFT and {math.ceil(point.itl * 1e3)} ms of ITL"
                )


def _error(on: Device | Profile | dict[str, Profile]) -> float:
    """The relative error of the step times: the largest one of several profiles."""
    return max(map(step_error, on.values())) if isinstance(on, dict) else step_error(on)
