"""Builds a runner: chooses device, threads and code, loads the model, sizes the KV cache and warms up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig, load_shape
from chairlift.models.shape import ModelShape
from chairlift.runner.cpu_executor import CpuExecutor
from chairlift.runner.executor import Loader, ModelExecutor, time_swap
from chairlift.runner.memory.budget import DeviceBudget, HostBudget
from chairlift.runner.memory.decision import Decision, asked
from chairlift.runner.memory.device_memory import CudaMemory, DeviceMemory, HostMemory, raise_out_of_memory
from chairlift.runner.memory.machine import available_memory, usable_cores
from chairlift.runner.memory.precision import Precision, decide
from chairlift.runner.memory.sizing import Size, StepSize, fit_host
from chairlift.runner.runner import ModelRunner
from chairlift.runner.tensor_parallel.shards import part_of
from chairlift.runner.torch_executor import TorchExecutor
from chairlift.runner.warm_up import capture_graphs, profile, warm_up
from chairlift.runner.weights import gguf_sizes


def build_runner(
    config: EngineConfig,
    directory: Path,
    on_phase: Callable[[str, float], None] = lambda name, seconds: None,
    load: Loader | None = None,
    overlaps: bool | None = None,
    memory: DeviceMemory | None = None,
) -> ModelRunner:
    """Loads the model of `directory`, allocates its KV cache and runs the first steps.

    Calls on_phase("weights" | "kv cache" | "warm-up", seconds) after each phase. `load`, `overlaps` and `memory` override the device's
    defaults in tests; with `overlaps` given, tokens are sampled as on a device.

    Raises ModelNotFound or UnsupportedModel for an unusable directory, InvalidSetting for a setting that does not suit the model or the
    machine, and OutOfMemory.
    """
    phase = _PhaseTimer(on_phase)
    processes = config.tensor_parallel_size
    device = _choose_device(config.device, processes)
    whole = load_shape(directory, in_torch=processes > 1 or device.value != "cpu")
    model_config = whole if processes == 1 else part_of(whole, processes)
    sharing = processes if device.value == "cpu" else 1  # processes that share this machine's cores and memory
    threads = _choose_threads(config.threads, sharing)
    config = replace(config, device=device.value, threads=int(threads.value), swap_space=config.swap_space // processes)
    torch.set_num_threads(int(threads.value))

    default_load, code = choose_executor(config, model_config)
    gguf = (0, 0) if config.load_format == "dummy" else gguf_sizes(directory)
    in_torch = not rust_supports(config, model_config)
    precision = decide(config, model_config, available_memory() // sharing, gguf, in_torch=in_torch)
    if memory is None and device.value == "cpu":
        memory = HostMemory()
        budget: HostBudget | DeviceBudget = HostBudget(sharing)
    else:
        memory = memory or CudaMemory(torch.device(device.value))
        budget = DeviceBudget(memory, config.gpu_memory_utilization)
    budget.check(config, whole, precision)
    with raise_out_of_memory("no memory for the weights: use a smaller model, or see what else is on the device; "):
        model = (load or default_load)(config, directory, model_config, precision)
    phase.end("weights")

    samples_on_device = model.device.type != "cpu" or overlaps is not None
    overlaps = samples_on_device if overlaps is None else overlaps

    def make(size: Size) -> ModelRunner:
        return ModelRunner(model, model_config, memory, size, config.block_size, overlaps=overlaps, samples_on_device=samples_on_device)

    def run_largest_step(step: StepSize) -> None:
        context = config.max_model_len or model_config.max_position_embeddings
        model.allocate(1, config.block_size, 0)
        profile(make(Size(1, context, step.seqs, step.tokens)))

    size = budget.fit(config, model_config, precision, run_largest_step)
    host_blocks = fit_host(config, model_config, precision.kv, available_memory() // processes)
    model.allocate(size.num_blocks, config.block_size, host_blocks)
    swap_ns_per_block = time_swap(model, min(host_blocks, size.num_blocks)) if host_blocks else 0
    with raise_out_of_memory("no memory for steps: lower --gpu-memory-utilization; "):
        runner = make(size)
        phase.end("kv cache")
        warm_up(runner)
        graphs = capture_graphs(runner, memory, enforce_eager=config.enforce_eager)
    runner.host_blocks, runner.swap_ns_per_block = host_blocks, swap_ns_per_block
    runner.decisions = (code, device, threads, *precision.decisions, *size.decisions, *graphs)
    phase.end("warm-up")
    return runner


class _PhaseTimer:
    """Reports the duration of successive phases."""

    def __init__(self, on_phase: Callable[[str, float], None]) -> None:
        self._on_phase, self._began = on_phase, time.perf_counter()

    def end(self, name: str) -> None:
        """Reports the phase that ends now."""
        now = time.perf_counter()
        self._on_phase(name, now - self._began)
        self._began = now


def rust_supports(config: EngineConfig, model: ModelShape) -> bool:
    """Whether the CPU kernels in Rust compute the model. They store weights and KV in more dtypes than torch."""
    return config.device == "cpu" and config.tensor_parallel_size == 1 and isinstance(model, ModelConfig)


def choose_executor(config: EngineConfig, model: ModelShape) -> tuple[Loader, Decision]:
    """Chooses the code for a model: CPU kernels in Rust, else our model in torch, else transformers' model."""
    name = model.architecture
    if config.tensor_parallel_size > 1:
        # Imported here because few engines are tensor-parallel.
        from chairlift.runner.tensor_parallel.executor import TensorParallelExecutor

        code = f"{name}, in torch, in {config.tensor_parallel_size} processes"
        return TensorParallelExecutor.load, Decision("code", code, asked("--tensor-parallel-size"))
    if rust_supports(config, model):
        return _load_in_rust, Decision("code", f"{name}, in Rust", "the CPU kernels support it")
    if not isinstance(model, ModelConfig):
        return TorchExecutor.load, Decision("code", f"transformers' {name}, with paged attention", model.not_ours)
    return TorchExecutor.load, Decision("code", f"{name}, in torch with Triton kernels", "the device is a CUDA device")


def _load_in_rust(config: EngineConfig, directory: Path, model: ModelShape, precision: Precision) -> ModelExecutor:
    assert isinstance(model, ModelConfig)
    return CpuExecutor.load(config, directory, model, precision)


def _choose_device(name: str, count: int) -> Decision:
    if name != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() < count:
        raise InvalidSetting(f"--tensor-parallel-size {count}: torch sees {torch.cuda.device_count()} CUDA devices here")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("--device cuda: torch sees no CUDA device here (use --device cpu)")
    if name != "auto":
        return Decision("device", name, asked("--device"))
    if torch.cuda.is_available():
        return Decision("device", "cuda", "torch sees a CUDA device")
    return Decision("device", "cpu", "torch sees no CUDA device")


def _choose_threads(requested: int | None, processes: int) -> Decision:
    if requested is not None:
        return Decision("threads", str(requested), asked("--threads"))
    cores, limit = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal() and 0 < int(limit) < cores:
        return Decision("threads", limit, asked("OMP_NUM_THREADS"))
    if processes > 1:
        return Decision("threads", str(max(1, cores // processes)), f"{cores} physical cores for {processes} processes")
    return Decision("threads", str(cores), "physical cores that this process may use")
