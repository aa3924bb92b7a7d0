"""`simulate_models`: runs a trace through several models on one machine, whose engines take turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from chairlift import _core
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, InvalidTrace, did_you_mean
from chairlift.sim.devices import BYTES, Device, Profile, kv_bytes
from chairlift.sim.devices import device as known_device
from chairlift.sim.groups import percentiles
from chairlift.sim.result import Result
from chairlift.sim.run import Trace, data_types, longest_request, machine, ready, requests_of, simulating
from chairlift.sim.shapes import shape
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload

Machine = str | Device | Profile | Mapping[str, str | Profile]
"""A device for all models, or a file of `chairlift calibrate` for each, by the model's name."""


@dataclass(frozen=True, slots=True)
class SharedModel:
    """One of several models of a server: see `chairlift serve --models`."""

    name: str
    config: EngineConfig
    aliases: tuple[str, ...] = ()
    weight: int = 1
    """Its share of the time while others have requests too."""

    @property
    def target_itl(self) -> int | None:
        """Microseconds that should pass between two steps at most, as in the server."""
        return None if self.config.target_itl_ms is None else round(self.config.target_itl_ms * 1000)


class ModelsResult:
    """The results of several models: `results` by name. `wall` is the seconds that the simulation took to run."""

    def __init__(self, results: Mapping[str, Result], wall: float) -> None:
        self.results = dict(results)
        self.wall = wall

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last end, over all models."""
        served = [result.requests for result in self.results.values() if len(result.requests)]
        if not served:
            return 0.0
        return float(max(one["ended"].max() for one in served) - min(one["arrived"].min() for one in served)) / 1e6

    def figures(self) -> dict[str, dict[str, float | None]]:
        """The figures of each model. Names that end in `_s` are seconds. None is unknown.

        `tokens_per_s` and `time_share`, the share of the time in which the model's steps ran, are of the span of all models.
        """
        span = self.span or None
        return {
            name: {
                "requests": len(result.requests) + len(result.refused),
                "finished": len(result.finished),
                **percentiles("ttft", result.ttft(), 50, 95),
                "itl_p95_s": result.itl(95),
                "tokens_per_s": None if span is None else result.stats["generated_tokens"] / span,
                "time_share": None if span is None else result.busy / span,
            }
            for name, result in self.results.items()
        }

    def document(self) -> dict[str, Any]:
        """The figures of each model, and each model's own document, as plain data."""
        models = {name: result.document() for name, result in self.results.items()}
        return {"figures": self.figures(), "span_s": self.span, "wall_s": self.wall, "models": models}


def simulate_models(
    trace: Trace,
    models: Sequence[SharedModel],
    *,
    device: Machine = "cpu",
    rate_scale: float = 1.0,
    requests: int | None = None,
    step_times: Mapping[str, StepTime] | None = None,
) -> ModelsResult:
    """Simulates a server with several models, all loaded, which runs a step of one model at a time.

    Args:
        trace: as in `simulate`. A request is for its `model`, a name or an alias; without one for the first model.
        models: the models with their settings. Tenants' weights are those of the first.
        device: a well-known device, whose memory the models share, or files of `chairlift calibrate` by the model's name.
        rate_scale: multiplies the request rate.
        requests: the number of requests; a shorter trace is repeated.
        step_times: replace the device's step times, by the model's name.

    The same arguments give the same result, bit for bit. Raises InvalidTrace, InvalidSetting or ModelNotFound.
    """
    workload = requests_of(trace, models[0].config)
    workload = ready(numbered(workload, models), rate_scale, requests)
    return SharedMachine.of(models, device, step_times or {}).run(workload)


@dataclass(frozen=True, slots=True)
class SharedMachine:
    """Several models on one machine, with each one's scheduler's settings and step times."""

    models: tuple[tuple[SharedModel, dict[str, Any], StepTime], ...]

    @classmethod
    def of(cls, models: Sequence[SharedModel], device: Machine, step_times: Mapping[str, StepTime] | None = None) -> SharedMachine:
        """The models on a device, as in `simulate_models`."""
        if not models:
            raise InvalidSetting("a simulation of several models needs at least one")
        pairs = zip(models, _machines(models, device, step_times or {}), strict=True)
        return cls(tuple((model, settings, steps) for model, (settings, steps) in pairs))

    def run(self, workload: Workload) -> ModelsResult:
        """Simulates a workload whose column `model` has indices into the models. Raises InvalidSetting if settings are impossible."""
        shared = [(settings, steps.numbers, model.weight, model.target_itl) for model, settings, steps in self.models]
        start = time.perf_counter()
        policies = [settings.get("scheduling_policy") for _, settings, _ in self.models]
        with simulating(*policies) as failures:
            reports = _core.simulate_models(workload.requests, workload.names, workload.name_block, list(workload.tenants), shared)
        wall = time.perf_counter() - start
        weights, results = dict(workload.tenants), {}
        for (model, settings, _), policy, report in zip(self.models, policies, reports, strict=True):
            results[model.name] = Result([report], settings, wall, weights=weights, policy_failure=failures[policy])
        return ModelsResult(results, wall)

    def times(self, factor: float) -> SharedMachine:
        """The same machine with steps that take `factor` times as long."""
        return SharedMachine(tuple((model, settings, steps.times(factor)) for model, settings, steps in self.models))

    @property
    def longest(self) -> list[int]:
        """The most tokens of a request of each model, prompt and output."""
        return [longest_request(settings) for _, settings, _ in self.models]


def devices_of(text: str) -> str | dict[str, str]:
    """A device or file, or a file for each model: the text of `--modelled-device`, NAME=FILE,NAME=FILE. Raises InvalidSetting."""
    if "=" not in text or Path(text).exists():
        return text
    files = dict(part.partition("=")[::2] for part in text.split(","))
    if bad := next((name for name, file in files.items() if not name or not file), None):
        raise InvalidSetting(f"--modelled-device {text}: expected NAME=FILE,NAME=FILE, got {bad!r:.100}")
    return files


def loaded(device: Machine) -> Device | Profile | dict[str, Profile]:
    """The device of a name, or the profiles of files. Raises InvalidSetting."""
    if isinstance(device, Mapping):
        return {name: Profile.load(one) if isinstance(one, str) else one for name, one in device.items()}
    return known_device(device)


def numbered(workload: Workload, models: Sequence[SharedModel]) -> Workload:
    """The workload with the column `model` as indices into `models`. Raises InvalidTrace for an unknown name."""
    numbers = {name: number for number, model in enumerate(models) for name in (model.name, *model.aliases)} | {"": 0}
    if unknown := next((name for name in workload.models if name not in numbers), None):
        hint = did_you_mean(unknown, numbers)
        raise InvalidTrace(f"the trace has requests for the model {unknown!r:.100}, which is none of the models{hint}")
    of = np.array([numbers[name] for name in workload.models], np.int64)
    return replace(workload.with_(model=of[workload.column("model")]), models=tuple(model.name for model in models))


def _machines(models: Sequence[SharedModel], device: Machine, step_times: Mapping[str, StepTime]) -> list[tuple[dict[str, Any], StepTime]]:
    """The scheduler's settings and the step times of each model."""
    if isinstance(device, Mapping) and (missing := [model.name for model in models if model.name not in device]):
        raise InvalidSetting(f"--modelled-device: it has no measurement of the model {missing[0]!r:.100}")
    on = loaded(device)
    if isinstance(on, dict):
        return [
            # The profile of a journal names no model, and fits any.
            machine(model.config.model if on[model.name].model else None, on[model.name], model.config, step_times.get(model.name))
            for model in models
        ]
    configs = [model.config for model in models]
    if isinstance(on, Device) and len(models) > 1:
        configs = _shared_memory(models, on)
    return [machine(config.model, on, config, step_times.get(model.name)) for model, config in zip(models, configs, strict=True)]


def _shared_memory(models: Sequence[SharedModel], on: Device) -> list[EngineConfig]:
    """The models' settings. Those without a size of their KV cache share what the others and all weights leave, equally."""
    left, unsized = 0.0, 0
    for at, model in enumerate(models):
        config, of = model.config, shape(model.config.model)
        dtype, kv = data_types(of, on, config)
        left += on.kv_memory(of, dtype) if at == 0 else -of.num_weights * BYTES[dtype]
        if config.num_kv_blocks:
            left -= config.num_kv_blocks * config.block_size * kv_bytes(of, kv)
        elif config.kv_cache_memory_bytes:
            left -= config.kv_cache_memory_bytes
        else:
            unsized += 1
    if left < 0 or (unsized and left < unsized):
        raise InvalidSetting(
            f"{len(models)} models do not fit in the {on.memory / 1e9:.0f} GB of {on.name}: use a larger device, smaller data types, or "
            "smaller KV caches"
        )
    each = int(left // unsized) if unsized else 0
    sized = (model.config.num_kv_blocks or model.config.kv_cache_memory_bytes for model in models)
    return [model.config if has else replace(model.config, kv_cache_memory_bytes=each) for model, has in zip(models, sized, strict=True)]
