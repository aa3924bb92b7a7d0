"""`simulate`: runs a trace through the scheduler on a modelled device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from chairlift import _core
from chairlift.bench.traces import TraceRequest, read
from chairlift.config import EngineConfig
from chairlift.engine import scheduler_settings
from chairlift.engine.arguments import engine_config
from chairlift.errors import InvalidSetting
from chairlift.models.shape import ModelShape
from chairlift.scheduling import TIER_WEIGHTS, TIERS
from chairlift.sim.devices import Device, Profile, device, kv_bytes
from chairlift.sim.policy import Policy, report_failure, use
from chairlift.sim.replay import Recording, is_journal
from chairlift.sim.result import Result
from chairlift.sim.shapes import shape
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload

SETTINGS = (
    *scheduler_settings.FLAGS,
    "tenant_weights",
    "block_size",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "swap_space",
    "dtype",
    "quantization",
)
"""The fields of `EngineConfig` that a simulation uses."""

_MAX_US = 3.2e16
"""The longest simulated time in microseconds: a thousand years."""

_DEFAULTS = EngineConfig()


Trace: TypeAlias = str | Path | Workload | Sequence[TraceRequest]
"""A file in any format that `chairlift bench` reads, a journal, or requests."""


def simulate(
    trace: Trace,
    *,
    model: str | None = None,
    device: str | Device | Profile = "cpu",
    rate_scale: float = 1.0,
    requests: int | None = None,
    replicas: int = 1,
    routing: str = "round-robin",
    step_time: StepTime | None = None,
    **settings: Any,
) -> Result:
    """Simulates the engine on a trace and returns latencies and throughput.

    Args:
        trace: a file in any format that `chairlift bench` reads, a journal, or requests.
        model: a well-known name (see `sim.shapes`), a directory, or a GGUF file.
        device: a well-known device (see `sim.devices`), or a file of `chairlift calibrate`, which determines model and data types.
        rate_scale: multiplies the request rate.
        requests: the number of requests; a shorter trace is repeated.
        replicas: the number of engines behind a router.
        routing: how the router chooses: "round-robin", "least-loaded", "prefix-aware", "lmetric" or "predicted".
        step_time: replaces the device's step times.
        settings: fields of `EngineConfig`, such as max_num_seqs or batching; scheduling_policy may be a `Policy`.

    The same arguments give the same result, bit for bit. Raises InvalidTrace, InvalidSetting, ModelNotFound, or TypeError for
    an unknown setting.
    """
    config = configured("simulate", settings)
    workload = ready(requests_of(trace, config), rate_scale, requests)
    settings, steps = machine(model, device, config, step_time)
    return run(workload, settings, steps, replicas=replicas, routing=routing, draft_tokens=config.num_speculative_tokens)


def configured(name: str, settings: Mapping[str, Any]) -> EngineConfig:
    """The settings that a simulation `name` was given, whose scheduling_policy may be a `Policy`. Raises as `engine_config`."""
    if isinstance(policy := settings.get("scheduling_policy"), Policy):
        settings = {**settings, "scheduling_policy": use(policy)}
    return engine_config(name, settings)


def requests_of(trace: Trace, config: EngineConfig) -> Workload:
    """The requests of a trace or of a journal. Raises InvalidTrace, or InvalidSetting for a damaged journal."""
    if isinstance(trace, Workload):
        return trace
    if not isinstance(trace, (str, Path)):
        return Workload.of(trace, config.tenant_weights)
    if not Path(trace).is_file() or not is_journal(trace):
        return Workload.of(read(trace), config.tenant_weights)
    workload, weights = Recording(trace).workload(), config.tenant_weights or {}
    # The recorded weights are those of tenant and tier. Each tenant here has requests of one tier.
    _, firsts = np.unique(workload.column("tenant"), return_index=True)
    factors = ({**TIER_WEIGHTS, **(config.tier_weights or {})}[TIERS[tier]] for tier in workload.column("tier")[firsts])
    pairs = zip(workload.tenants, factors, strict=True)
    tenants = ((name, factor * weights[name] if name in weights else weight) for (name, weight), factor in pairs)
    return replace(workload, tenants=tuple(tenants))


def ready(workload: Workload, rate_scale: float, requests: int | None) -> Workload:
    """The first `requests` of a workload, repeated if it is shorter, at `rate_scale` times the rate. Raises InvalidSetting."""
    if not (0 < rate_scale < math.inf) or not len(workload) or (requests is not None and requests < 1):
        raise InvalidSetting("a simulation needs at least one request, and a rate scale above 0")
    if workload.column("arrival_us")[-1] * max(1.0, (requests or 1) / len(workload)) / rate_scale > _MAX_US:
        raise InvalidSetting("the simulation would span more than a thousand years: use a larger rate scale, or fewer requests")
    if requests is not None:
        workload = workload.first(requests) if requests <= len(workload) else workload.repeated(requests)
    return workload.faster(rate_scale)


def run(
    workload: Workload,
    settings: dict[str, Any],
    step_time: StepTime,
    *,
    replicas: int = 1,
    routing: str = "round-robin",
    draft_tokens: int = 0,
) -> Result:
    """Simulates a workload with the settings of `_core.Scheduler`. Raises InvalidSetting if they are impossible.

    `draft_tokens` is the maximum number of tokens that a sequence's recorded drafts propose in a step.
    """
    if replicas < 1:
        raise InvalidSetting(f"--replicas must be at least 1, got {replicas}")
    start = time.perf_counter()
    steps = step_time.numbers
    columns, names, tenants = workload.requests, workload.names, list(workload.tenants)
    policy = settings.get("scheduling_policy")
    with simulating(policy) as failures:
        reports = _core.simulate(
            columns,
            names,
            workload.name_block,
            tenants,
            settings,
            steps,
            drafts=np.ascontiguousarray(workload.drafts),
            draft_tokens=draft_tokens,
            replicas=replicas,
            routing=routing,
        )
    return Result(reports, settings, time.perf_counter() - start, weights=dict(tenants), policy_failure=failures[policy])


@contextmanager
def simulating(*policies: str | None) -> Iterator[dict[str | None, str | None]]:
    """Raises InvalidSetting if what the block simulates is impossible. Logs what these policies raised in it.

    Gives what each raised, or None, once the block has ended.
    """
    failures: dict[str | None, str | None] = {}
    try:
        yield failures
    except (ValueError, OverflowError) as error:
        raise InvalidSetting(f"this cannot be simulated: {error}") from None
    for policy in dict.fromkeys(policies):  # one that several models have is asked once
        failures[policy] = report_failure(policy)


def longest_request(settings: Mapping[str, Any]) -> int:
    """The most tokens of a request, prompt and output, with these settings of a scheduler."""
    return int(min(settings["max_model_len"], (settings["num_kv_blocks"] - 1) * settings["block_size"]))


def machine(
    model: str | None, on: str | Device | Profile, config: EngineConfig, step_time: StepTime | None = None
) -> tuple[dict[str, Any], StepTime]:
    """The scheduler's settings and the step times of a model on a device. Raises InvalidSetting if the model does not fit."""
    known = device(on)
    if isinstance(known, Profile):
        _check_measured(known, model, config)
        sizes = known.sizes
        blocks = config.num_kv_blocks or sizes["num_kv_blocks"]
        longest, slots = config.max_model_len or sizes["max_model_len"], config.max_num_seqs or sizes["max_num_seqs"]
        tokens = config.max_num_batched_tokens or max(slots, sizes["max_num_batched_tokens"])
        settings = scheduler_settings.of_config(
            config,
            num_kv_blocks=blocks,
            block_size=sizes["block_size"],
            max_num_batched_tokens=tokens,
            max_num_seqs=slots,
            max_model_len=longest,
        )
        return settings, step_time or known.step
    return _on_device(shape(model or config.model), known, config, step_time)


def _check_measured(profile: Profile, model: str | None, config: EngineConfig) -> None:
    """Raises InvalidSetting for a model or data type other than the profile's."""
    advice = "leave it out, or calibrate again with it"
    if model not in (None, profile.model):
        raise InvalidSetting(f"--model {model}: {profile.name} was measured with {profile.model or 'an unnamed model'}; {advice}")
    known = {"block_size": profile.sizes["block_size"], **profile.data_types}
    for name in ("block_size", "dtype", "quantization", "kv_cache_dtype"):
        requested, measured = getattr(config, name), known.get(name, "its engine's default")
        if requested not in (getattr(_DEFAULTS, name), measured):
            raise InvalidSetting(f"--{name.replace('_', '-')} {requested}: {profile.name} was measured with {measured}; {advice}")
    check_sizes(config)


def check_sizes(config: EngineConfig) -> None:
    """Raises InvalidSetting for settings in bytes: a measured machine's blocks have no known size."""
    if config.kv_cache_memory_bytes:
        raise InvalidSetting("--kv-cache-memory-bytes: the block size of a measured machine is unknown; use --num-kv-blocks")
    if config.swap_space:
        raise InvalidSetting("--swap-space: the block size of a measured machine is unknown; use a known --modelled-device")


def model_on(on: Device | Profile, config: EngineConfig) -> str:
    """The model that a profile was measured with, or else that of `config`."""
    return on.model if isinstance(on, Profile) else config.model


def basis(model: str | None, on: Device | Profile, config: EngineConfig) -> str:
    """A note on the source of the step times and the data types of a model on a device."""
    if isinstance(on, Profile):
        return on.basis
    dtype, kv = data_types(shape(model or config.model), on, config)
    return f"{on.basis} Data types: weights {dtype}, KV cache {kv}."


def data_types(model: ModelShape, on: Device, config: EngineConfig) -> tuple[str, str]:
    """The data types of weights and of the KV cache on a device."""
    usual = on.dtype if config.dtype == "auto" else config.dtype
    if config.quantization == "none" and usual == "int8":
        usual = model.dtype if model.dtype in ("bfloat16", "float16") else "float32"
    dtype = config.quantization if config.quantization in ("int8", "fp8") else usual
    return dtype, config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "float32" if on.name == "cpu" else "bfloat16"


def block_bytes(model: str | None, on: str | Device | Profile, config: EngineConfig) -> float:
    """The bytes of a KV block of a model on a device. Raises InvalidSetting for a measured machine."""
    known = device(on)
    if isinstance(known, Profile):
        raise InvalidSetting("--disk: the block size of a measured machine is unknown; use a known --modelled-device")
    found = shape(model or config.model)
    return kv_bytes(found, data_types(found, known, config)[1]) * config.block_size


def _on_device(model: ModelShape, on: Device, config: EngineConfig, step_time: StepTime | None) -> tuple[dict[str, Any], StepTime]:
    dtype, kv = data_types(model, on, config)
    if kv not in (("float32", "float16", "bfloat16", "int8") if on.name == "cpu" else ("bfloat16", "float16", "fp8")):
        raise InvalidSetting(f"--kv-cache-dtype {kv}: {on.name} does not support it (int8 is for CPUs, fp8 for GPUs)")
    block = kv_bytes(model, kv) * config.block_size
    memory = config.kv_cache_memory_bytes or on.kv_memory(model, dtype)
    blocks = config.num_kv_blocks or int(memory // block)
    if blocks < 2 and on.kv_memory(model, dtype) > 0:
        raise InvalidSetting(
            f"the KV cache needs two blocks, but {max(blocks, 0)} of {config.block_size:,} tokens fit: use a smaller --block-size, "
            "or a larger --num-kv-blocks or --kv-cache-memory-bytes"
        )
    if blocks < 2:
        raise InvalidSetting(
            f"{model.num_weights / 1e9:.1f} billion weights in {dtype} leave no memory for a KV cache in the {on.memory / 1e9:.0f} GB of "
            f"{on.name}: use a larger device{', or --quantization int8' if on.name == 'cpu' else ''}"
        )
    longest = config.max_model_len or min(model.max_position_embeddings, (blocks - 1) * config.block_size)
    slots = config.max_num_seqs or min(on.slots, config.max_num_batched_tokens or on.slots)
    tokens = config.max_num_batched_tokens or max(on.step_tokens, slots)
    settings = scheduler_settings.of_config(
        config,
        num_kv_blocks=blocks,
        block_size=config.block_size,
        max_num_batched_tokens=tokens,
        max_num_seqs=slots,
        max_model_len=longest,
        host_blocks=int(config.swap_space // block),
        swap_ns_per_block=round(block / on.link * 1e9),
        experts=model.expert_counts[0],
        experts_used=model.expert_counts[1],
    )
    return settings, step_time or on.step_time(model, dtype=dtype, kv=kv)
