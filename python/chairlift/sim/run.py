"""`simulate`: a trace, a model and a machine in; what would have come of them out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift import _core
from chairlift.bench.traces import TraceRequest, read
from chairlift.config import EngineConfig
from chairlift.engine import scheduler_settings
from chairlift.errors import InvalidSetting
from chairlift.models.shape import ModelShape
from chairlift.sim.devices import Device, Profile, device, kv_bytes
from chairlift.sim.result import Result
from chairlift.sim.shapes import shape
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload

_LONGEST_US = 3.2e16
"""Microseconds that a simulation may span: a thousand years."""

_DEFAULTS = EngineConfig()


def simulate(
    trace: str | Path | Workload | Sequence[TraceRequest],
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
    """Runs a trace through the scheduler in virtual time, and says how its requests would have fared.

    `trace` is a file in any form that `chairlift bench` reads, or what was read from one. `model` is a known name (see `sim.shapes`), a
    directory or a GGUF file; `device` a known machine's name or a file of `chairlift calibrate`, which knows its model and how that was
    kept: nothing else can be asked of it. `rate_scale` multiplies the arrival rate, `requests` takes the first so many (or repeats the
    trace until there are so many). With `replicas` there are several such engines behind a router. `step_time` says what steps take in the
    machine's stead. `settings` are fields of `EngineConfig`: max_num_seqs, scheduling_policy, batching... The same arguments give the same
    numbers, to the bit. Raises InvalidTrace, InvalidSetting, ModelNotFound, or ValueError for a setting.
    """
    config = EngineConfig(**settings)
    workload = trace if isinstance(trace, Workload) else Workload.of(_lines(trace), config.tenant_weights)
    workload = ready(workload, rate_scale, requests)
    return run(workload, *machine(model, device, config, step_time), replicas=replicas, routing=routing)


def ready(workload: Workload, rate_scale: float, requests: int | None) -> Workload:
    """So many of a workload's requests, repeated if need be, at `rate_scale` times their rate; raises InvalidSetting."""
    if not (0 < rate_scale < math.inf) or not len(workload) or (requests is not None and requests < 1):
        raise InvalidSetting("a simulation needs one request at least, and a rate scale above 0")
    if workload.column("arrival_us")[-1] * max(1.0, (requests or 1) / len(workload)) / rate_scale > _LONGEST_US:
        raise InvalidSetting("a simulation of more than a thousand years: take a larger rate scale, or fewer requests")
    if requests is not None:
        workload = workload.first(requests) if requests <= len(workload) else workload.repeated(requests)
    return workload.faster(rate_scale)


def run(workload: Workload, settings: dict[str, Any], step_time: StepTime, *, replicas: int = 1, routing: str = "round-robin") -> Result:
    """The same with the settings of `_core.Scheduler`; raises InvalidSetting where these run nothing."""
    if replicas < 1:
        raise InvalidSetting(f"--replicas must be at least 1, got {replicas}")
    began = time.perf_counter()
    steps = (step_time.curve, step_time.decode_seq, step_time.context_token, step_time.prefill_pair)
    columns, names, tenants = workload.requests, workload.names, list(workload.tenants)
    try:
        reports = _core.simulate(columns, names, workload.name_block, tenants, settings, steps, replicas=replicas, routing=routing)
    except (ValueError, OverflowError) as error:
        raise InvalidSetting(f"this cannot be simulated: {error}") from None
    return Result(reports, settings, time.perf_counter() - began)


def machine(
    model: str | None, on: str | Device | Profile, config: EngineConfig, step_time: StepTime | None = None
) -> tuple[dict[str, Any], StepTime]:
    """The scheduler's settings and the steps' times of a model on a machine; raises InvalidSetting where it does not fit."""
    known = device(on) if isinstance(on, str) else on
    if isinstance(known, Profile):
        _check_measured(known, model, config)
        sizes = known.sizes
        blocks = config.num_kv_blocks or sizes["num_kv_blocks"]
        longest, seats = config.max_model_len or sizes["max_model_len"], config.max_num_seqs or sizes["max_num_seqs"]
        tokens = config.max_num_batched_tokens or max(seats, sizes["max_num_batched_tokens"])
        settings = scheduler_settings.of_config(
            config,
            num_kv_blocks=blocks,
            block_size=sizes["block_size"],
            max_num_batched_tokens=tokens,
            max_num_seqs=seats,
            max_model_len=longest,
            host_blocks=0,
            swap_ns_per_block=0,
        )
        return settings, step_time or known.step
    return _on_device(shape(model or config.model), known, config, step_time)


def _check_measured(profile: Profile, model: str | None, config: EngineConfig) -> None:
    """Raises InvalidSetting for what a profile knows nothing of: its steps are those of one model, which was kept in one way."""
    again = "leave it out, or calibrate again with it"
    if model not in (None, profile.model):
        told = profile.model or "a model that its file does not name"
        raise InvalidSetting(f"--model {model}: {profile.name} was measured with {told}; {again}")
    kept = {"block_size": profile.sizes["block_size"], **profile.kept}
    for name in ("block_size", "dtype", "quantization", "kv_cache_dtype"):
        asked, measured = getattr(config, name), kept.get(name, "what its engine had")
        if asked not in (getattr(_DEFAULTS, name), measured):
            raise InvalidSetting(f"--{name.replace('_', '-')} {asked}: {profile.name} was measured with {measured}; {again}")
    check_sizes(config)


def check_sizes(config: EngineConfig) -> None:
    """Raises InvalidSetting for what a measured machine cannot be asked for: how many bytes its blocks have is not known."""
    if config.kv_cache_memory_bytes:
        raise InvalidSetting("--kv-cache-memory-bytes: a measured machine's blocks have no size here; take --num-kv-blocks")
    if config.swap_space:
        raise InvalidSetting("--swap-space: a measured machine's blocks have no size here; name a device instead")


def basis(model: str | None, on: Device | Profile, config: EngineConfig) -> str:
    """What the steps' times of a model on a machine rest on, and in which form weights, keys and values are taken to be kept."""
    if isinstance(on, Profile):
        return on.basis
    dtype, kv = _forms(shape(model or config.model), on, config)
    return f"{on.basis} Weights are taken to be in {dtype}, keys and values in {kv}."


def _forms(model: ModelShape, on: Device, config: EngineConfig) -> tuple[str, str]:
    """In which form a machine keeps weights, and keys and values."""
    usual = on.dtype if config.dtype == "auto" else config.dtype
    if config.quantization == "none" and usual == "int8":
        usual = model.dtype if model.dtype in ("bfloat16", "float16") else "float32"
    dtype = config.quantization if config.quantization in ("int8", "fp8") else usual
    return dtype, config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "float32" if on.name == "cpu" else "bfloat16"


def _on_device(model: ModelShape, on: Device, config: EngineConfig, step_time: StepTime | None) -> tuple[dict[str, Any], StepTime]:
    dtype, kv = _forms(model, on, config)
    if kv not in (("float32", "float16", "int8") if on.name == "cpu" else ("bfloat16", "float16", "fp8")):
        raise InvalidSetting(f"--kv-cache-dtype {kv}: {on.name} keeps no keys and values so (int8 is for CPUs, fp8 for GPUs)")
    block = kv_bytes(model, kv) * config.block_size
    memory = config.kv_cache_memory_bytes or on.kv_memory(model, dtype)
    blocks = config.num_kv_blocks or int(memory // block)
    if blocks < 2 and on.kv_memory(model, dtype) > 0:
        raise InvalidSetting(
            f"a KV cache needs two blocks, and {max(blocks, 0)} of {config.block_size:,} tokens fit: take a smaller --block-size, "
            "or more by --num-kv-blocks or --kv-cache-memory-bytes"
        )
    if blocks < 2:
        raise InvalidSetting(
            f"{model.num_weights / 1e9:.1f} billion weights in {dtype} leave no room for a KV cache in the {on.memory / 1e9:.0f} GB of "
            f"{on.name}: take a larger device{', or --quantization int8' if on.name == 'cpu' else ''}"
        )
    longest = config.max_model_len or min(model.max_position_embeddings, (blocks - 1) * config.block_size)
    seats = config.max_num_seqs or min(on.seats, config.max_num_batched_tokens or on.seats)
    tokens = config.max_num_batched_tokens or max(on.step_tokens, seats)
    settings = scheduler_settings.of_config(
        config,
        num_kv_blocks=blocks,
        block_size=config.block_size,
        max_num_batched_tokens=tokens,
        max_num_seqs=seats,
        max_model_len=longest,
        host_blocks=int(config.swap_space // block),
        swap_ns_per_block=round(block / on.link * 1e9),
    )
    return settings, step_time or on.step_time(model, dtype=dtype, kv=kv)


def _lines(trace: str | Path | Sequence[TraceRequest]) -> Sequence[TraceRequest]:
    return read(trace) if isinstance(trace, (str, Path)) else trace
