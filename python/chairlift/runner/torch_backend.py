"""Runs a model in torch: on CUDA devices, in several processes, or with transformers' code."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from chairlift.checkpoint.weight_files import gguf_link
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.models.config import ModelConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.executor import Loader, ModelExecutor
from chairlift.runner.launcher import explain_launcher_error
from chairlift.runner.memory.budget import DeviceBudget
from chairlift.runner.memory.decision import Decision, asked
from chairlift.runner.memory.device_memory import CudaMemory, DeviceMemory, HostMemory, raise_out_of_memory
from chairlift.runner.memory.precision import FP8_CAPABILITY, Precision, decide
from chairlift.runner.memory.sizing import HostBudget, Size
from chairlift.runner.runner import ModelRunner
from chairlift.runner.tensor_parallel.executor import TensorParallelExecutor
from chairlift.runner.tensor_parallel.split import part_of
from chairlift.runner.torch_executor import DeviceExecutor, TorchExecutor
from chairlift.runner.torch_runner import TorchRunner
from chairlift.runner.warm_up import profile, warm_up

NO_STEPS = "no memory for steps: lower --gpu-memory-utilization; "


class TorchBackend:
    """The `Backend` in torch."""

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        whole: ModelShape,
        sharing: int,
        *,
        load: Loader | None = None,
        overlaps: bool | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """`load`, `overlaps` and `memory` override the device's defaults in tests; with `overlaps` given, tokens are sampled in torch."""
        processes = config.tensor_parallel_size
        self._config, self._directory = config, directory
        self.model = whole if processes == 1 else part_of(whole, processes)
        default, self.code = _choose_executor(config, self.model)
        self._load = load or default
        self._samples_on_device = config.device != "cpu" or overlaps is not None
        self._overlaps = self._samples_on_device if overlaps is None else overlaps
        torch.set_num_threads(config.threads or 1)
        if memory is None and config.device == "cpu":
            self._memory: DeviceMemory = HostMemory()
            self.budget: HostBudget | DeviceBudget = HostBudget(sharing)
        else:
            if config.device == "cuda" and memory is None:
                _load_launcher()
            self._memory = memory or CudaMemory(torch.device(config.device))
            self.budget = DeviceBudget(self._memory, config.gpu_memory_utilization)

    def decide(self, available: int) -> Precision:
        """Chooses the dtypes."""
        # Without a device, as in tests, the lowest capability is assumed.
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else FP8_CAPABILITY
        is_gguf = gguf_link(self._directory) is not None
        return decide(self._config, self.model, available, in_torch=True, capability=capability, is_gguf=is_gguf)

    def load(self, precision: Precision) -> ModelExecutor:
        """Loads the weights."""
        with raise_out_of_memory("no memory for the weights: use a smaller model, or see what else is on the device; "):
            return self._load(self._config, self._directory, self.model, precision)

    def make_runner(self, executor: ModelExecutor, size: Size) -> TorchRunner:
        """Makes a runner."""
        assert isinstance(executor, DeviceExecutor)
        with raise_out_of_memory(NO_STEPS):
            return TorchRunner(
                executor,
                self.model,
                self._memory,
                size,
                self._config.block_size,
                overlaps=self._overlaps,
                samples_on_device=self._samples_on_device,
            )

    def profile(self, runner: ModelRunner) -> None:
        """Runs the largest step, for which most kernels are compiled."""
        with _raise_kernel_errors(runner):
            profile(runner)

    def warm_up(self, runner: ModelRunner) -> tuple[Decision, ...]:
        """Runs the first steps and captures CUDA graphs."""
        assert isinstance(runner, TorchRunner)
        with raise_out_of_memory(NO_STEPS), _raise_kernel_errors(runner):
            warm_up(runner, self.model.expert_counts)
            graphs = runner.capture_graphs(enforce_eager=self._config.enforce_eager)
        if self._config.device == "cuda":
            from chairlift.kernels.compile_watch import watch  # imports triton, which is only installed for GPUs

            watch()
        return graphs


@contextmanager
def _raise_kernel_errors(runner: ModelRunner) -> Iterator[None]:
    """Turns errors of kernels that cannot run on the device into a ChairliftError of one line."""
    if not runner.compiles_kernels:
        yield
        return
    from chairlift.kernels.errors import KERNEL_ERRORS  # imports triton, which is only installed for GPUs

    try:
        with _raise_launcher_errors():
            yield
    except KERNEL_ERRORS as error:
        # The last line has the reason; those before it are the kernel's source.
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        raise ChairliftError(
            f"this device cannot run the model's kernels ({reason}): use --device cpu, and report the output of `chairlift doctor`"
        ) from error


@contextmanager
def _raise_launcher_errors() -> Iterator[None]:
    """Turns errors of Triton as it compiles its launcher into a ChairliftError that names what is missing."""
    try:
        yield
    except (RuntimeError, subprocess.CalledProcessError) as error:
        if (reason := explain_launcher_error(error)) is None:
            raise
        raise ChairliftError(f"{reason}; or use --device cpu") from error


def _load_launcher() -> None:
    """Loads Triton's launcher, or compiles it, before weights are loaded in vain. Raises ChairliftError."""
    from chairlift.kernels.compile_watch import pause  # these import triton, which is only installed for GPUs
    from chairlift.kernels.errors import load_launcher

    # Another engine of this process may be watched.
    pause()
    with _raise_launcher_errors():
        load_launcher()


def _choose_executor(config: EngineConfig, model: ModelShape) -> tuple[Loader, Decision]:
    """Chooses the code for a model: ours, or transformers'."""
    name = model.architecture
    if config.tensor_parallel_size > 1:
        code = f"{name}, in torch, in {config.tensor_parallel_size} processes"
        return TensorParallelExecutor.load, Decision("code", code, asked("--tensor-parallel-size"))
    if not isinstance(model, ModelConfig):
        return TorchExecutor.load, Decision("code", f"transformers' {name}, with paged attention", model.not_ours)
    if config.device == "cpu":
        return TorchExecutor.load, Decision("code", f"{name}, in torch", asked("--runner"))
    return TorchExecutor.load, Decision("code", f"{name}, in torch with Triton kernels", "the device is a CUDA device")
