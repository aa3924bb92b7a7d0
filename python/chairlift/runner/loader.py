"""Which code computes a model, and why."""

from __future__ import annotations

from pathlib import Path

from chairlift.config import EngineConfig
from chairlift.models.config import ModelConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.cpu_executor import CpuExecutor
from chairlift.runner.executor import Loader, ModelExecutor
from chairlift.runner.memory.decision import Decision, asked
from chairlift.runner.memory.precision import Precision
from chairlift.runner.torch_executor import TorchExecutor


def in_rust(config: EngineConfig, model: ModelShape) -> bool:
    """Whether our own kernels for CPUs compute the model, which keep weights and KV in more forms than torch does."""
    return config.device == "cpu" and config.tensor_parallel_size == 1 and isinstance(model, ModelConfig)


def loader(config: EngineConfig, model: ModelShape) -> tuple[Loader, Decision]:
    """What loads a model for the settings' device, cpu or cuda: our kernels first, then our model in torch, then transformers' own."""
    name = model.architecture
    if config.tensor_parallel_size > 1:
        # Here, for few need to start processes.
        from chairlift.runner.tensor_parallel.executor import TensorParallelExecutor

        code = f"{name}, in torch, in {config.tensor_parallel_size} processes"
        return TensorParallelExecutor.load, Decision("code", code, asked("--tensor-parallel-size"))
    if in_rust(config, model):
        return _load_in_rust, Decision("code", f"{name}, in Rust", "the CPU's kernels know it")
    if not isinstance(model, ModelConfig):
        return TorchExecutor.load, Decision("code", f"transformers' {name}, with paged attention", model.not_ours)
    return TorchExecutor.load, Decision("code", f"{name}, in torch with kernels of ours", "what a CUDA device runs best")


def _load_in_rust(config: EngineConfig, directory: Path, model: ModelShape, precision: Precision) -> ModelExecutor:
    assert isinstance(model, ModelConfig)
    return CpuExecutor.load(config, directory, model, precision)
