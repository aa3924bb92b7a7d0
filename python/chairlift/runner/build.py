"""Builds a runner: chooses device, threads and code, loads the model, sizes the KV cache and warms up."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, pip_install_with_torch
from chairlift.machine import available_memory, usable_cores
from chairlift.models.config import ModelConfig
from chairlift.models.entries import report_entries
from chairlift.models.shape import ModelShape
from chairlift.runner.cuda import KERNEL_DRIVER, check_device, compute_capability, cuda_devices, has_cuda_driver, too_old, why_no_device
from chairlift.runner.executor import ModelExecutor, time_swap
from chairlift.runner.memory.decision import Decision, asked
from chairlift.runner.memory.precision import Precision
from chairlift.runner.memory.sizing import HostBudget, Size, StepSize, block_bytes, fit_host
from chairlift.runner.model_shape import model_shape
from chairlift.runner.runner import ModelRunner
from chairlift.runner.rust_backend import RustBackend
from chairlift.runner.tensor_parallel.split import part_of

if TYPE_CHECKING:
    from chairlift.runner.memory.budget import DeviceBudget


log = logging.getLogger("chairlift")


class Backend(Protocol):
    """The code that loads and runs a model: `RustBackend` or `TorchBackend`.

    Its settings are complete: `device` is cpu or cuda, `threads` a number.
    """

    code: Decision

    @property
    def model(self) -> ModelShape:
        """This process's part of the model."""

    @property
    def budget(self) -> HostBudget | DeviceBudget:
        """The memory for weights, steps and KV cache."""

    def decide(self, available: int) -> Precision:
        """Chooses the dtypes for `available` bytes of free host memory. Raises InvalidSetting."""

    def load(self, precision: Precision) -> ModelExecutor:
        """Loads the weights. Raises ModelNotFound, UnsupportedModel or OutOfMemory."""

    def make_runner(self, executor: ModelExecutor, size: Size) -> ModelRunner:
        """Makes a runner of these sizes. Raises OutOfMemory."""

    def profile(self, runner: ModelRunner) -> None:
        """Runs the largest step. Raises ChairliftError if the device cannot run it."""

    def warm_up(self, runner: ModelRunner) -> tuple[Decision, ...]:
        """Runs the first steps. Returns decisions about them. Raises OutOfMemory."""


BackendMaker = Callable[[EngineConfig, Path, ModelShape, int], Backend]
"""Makes a backend from settings, a checkpoint's directory, the whole model, and the number of processes that share this machine."""


def build_runner(
    config: EngineConfig,
    directory: Path,
    on_phase: Callable[[str, float], None] = lambda name, seconds: None,
    make_backend: BackendMaker | None = None,
) -> ModelRunner:
    """Loads the model of `directory`, allocates its KV cache and runs the first steps.

    Calls on_phase("weights" | "kv cache" | "warm-up", seconds) after each phase. `make_backend` overrides the choice of the backend in
    tests.

    Raises ModelNotFound or UnsupportedModel for an unusable directory, InvalidSetting for a setting that does not suit the model or the
    machine, and OutOfMemory.
    """
    phase = _PhaseTimer(on_phase)
    processes = config.tensor_parallel_size
    check_device(config.device, config.runner, processes)
    device = _choose_device(config.device, processes)
    in_torch = processes > 1 or device.value != "cpu" or config.runner == "torch"
    whole = model_shape(directory, in_torch=in_torch, load_format=config.load_format)
    report_entries(directory, whole)
    if processes > 1:
        part_of(whole, processes)  # refuses a model that cannot be split before torch is imported, which takes seconds
    config = config.for_positions(whole.longest_context)
    sharing = processes if device.value == "cpu" else 1  # processes that share this machine's cores and memory
    threads = choose_threads(config.threads, sharing)
    config = replace(config, device=device.value, threads=int(threads.value), swap_space=config.swap_space // processes)

    backend = (make_backend or choose_backend(config, whole))(config, directory, whole, sharing)
    precision = backend.decide(available_memory() // sharing)
    backend.budget.check(config, whole, precision)
    model = backend.load(precision)
    phase.end("weights")

    def run_largest_step(step: StepSize) -> None:
        context = config.max_model_len or backend.model.max_position_embeddings
        model.allocate(1, config.block_size, 0)
        states = int(backend.model.state_bytes > 0)
        if states:
            model.allocate_states(states)
        backend.profile(backend.make_runner(model, Size(1, context, step.seqs, step.tokens, state_slots=states)))

    size = backend.budget.fit(config, backend.model, precision, run_largest_step)
    host_blocks = fit_host(config, backend.model, precision.kv, available_memory() // processes)
    model.allocate(size.num_blocks, config.block_size, host_blocks)
    if size.state_slots:
        model.allocate_states(size.state_slots)
    swap_ns_per_block = time_swap(model, min(host_blocks, size.num_blocks)) if host_blocks else 0
    runner = backend.make_runner(model, size)
    phase.end("kv cache")
    graphs = backend.warm_up(runner)
    runner.kv_cache_bytes = size.num_blocks * block_bytes(backend.model, config.block_size, precision.kv)
    runner.host_blocks, runner.swap_ns_per_block, runner.state_slots = host_blocks, swap_ns_per_block, size.state_slots
    runner.decisions = (backend.code, device, threads, *precision.decisions, *size.decisions, *graphs)
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


def import_backend() -> None:
    """Imports torch's backend where there is a CUDA driver, before it is known whether the settings need it. Without torch does nothing."""
    if has_cuda_driver():
        with contextlib.suppress(ModuleNotFoundError):
            import chairlift.runner.torch_backend  # noqa: F401


def choose_backend(config: EngineConfig, model: ModelShape) -> BackendMaker:
    """Chooses the CPU kernels in Rust if they support the device and the model, else torch; or as `--runner` says.

    Raises InvalidSetting if Rust does not support it, or if torch is not installed.
    """
    in_rust = config.device == "cpu" and config.tensor_parallel_size == 1 and isinstance(model, ModelConfig)
    if in_rust and config.runner != "torch":
        return RustBackend
    if config.enable_lora and config.tensor_parallel_size > 1:
        raise InvalidSetting(
            f"--enable-lora: adapters are computed in one process, not with --tensor-parallel-size {config.tensor_parallel_size}"
        )
    if config.enable_lora and not isinstance(model, ModelConfig):
        raise InvalidSetting(f"--enable-lora: transformers' code computes {model.architecture}; adapters need a model of docs/models.md")
    if config.cpu_isa != "auto":
        raise InvalidSetting(f"--cpu-isa {config.cpu_isa}: torch computes this model here, not the CPU kernels")
    if config.cpu_math not in ("auto", "exact"):
        raise InvalidSetting(f"--cpu-math {config.cpu_math}: torch computes this model here, not the CPU kernels")
    if config.runner == "rust":
        raise InvalidSetting(
            "--runner rust computes the models of docs/models.md in one process on a CPU: use --device cpu, or --runner torch"
        )
    try:
        # Imported here because the other backend runs without torch.
        from chairlift.runner.torch_backend import TorchBackend
    except ModuleNotFoundError as error:
        flag = "--runner torch" if in_rust else "--device cuda" if config.device == "cuda" else "--tensor-parallel-size"
        raise InvalidSetting(f"{flag} needs {error.name}: {pip_install_with_torch()}") from None
    return TorchBackend


def _choose_device(name: str, count: int) -> Decision:
    if name == "cpu":
        return Decision("device", "cpu", asked("--device"))
    try:
        devices = cuda_devices()
    except ModuleNotFoundError:
        if name == "cuda":
            raise InvalidSetting(f"--device cuda needs torch: {pip_install_with_torch()}") from None
        return Decision("device", "cpu", f"torch is not installed (for CUDA devices: {pip_install_with_torch()})")
    if 0 < devices < count:
        raise InvalidSetting(f"--tensor-parallel-size {count}: torch sees {devices} CUDA devices here")
    missing = None if devices else why_no_device()
    reason = too_old(compute_capability()) if missing is None else missing.text
    if reason and (name == "cuda" or (missing and missing.is_fault)):
        raise InvalidSetting(f"--device {name}: {reason} (use --device cpu for the CPU)")
    if name == "cuda":
        return Decision("device", "cuda", asked("--device"))
    if reason is None:
        return Decision("device", "cuda", "torch sees a CUDA device")
    if KERNEL_DRIVER.exists():
        log.warning("--device auto: the CPU is used, for %s", reason)
    return Decision("device", "cpu", reason)


def choose_threads(requested: int | None, processes: int) -> Decision:
    """Chooses the threads of one of `processes` processes."""
    if requested is not None:
        return Decision("threads", str(requested), asked("--threads"))
    cores, limit = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal() and 0 < int(limit) < cores:
        return Decision("threads", limit, asked("OMP_NUM_THREADS"))
    if processes > 1:
        return Decision("threads", str(max(1, cores // processes)), f"{cores} physical cores for {processes} processes")
    return Decision("threads", str(cores), "physical cores that this process may use")
