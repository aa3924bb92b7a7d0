"""The interface of the code that runs a model: `RustBackend` and `TorchBackend` implement it. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from chairlift.config import EngineConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.executor import ModelExecutor
from chairlift.runner.memory.decision import Decision
from chairlift.runner.memory.precision import Precision
from chairlift.runner.memory.sizing import Size
from chairlift.runner.runner import ModelRunner

if TYPE_CHECKING:
    from chairlift.runner.memory.budget import DeviceBudget
    from chairlift.runner.memory.host_budget import HostBudget


class Backend(Protocol):
    """The code that loads and runs a model. Its settings are complete: `device` is cpu or cuda, `threads` a number."""

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

    def warm_up(self, runner: ModelRunner) -> tuple[Decision, ...]:
        """Runs the first steps. Returns decisions about them. Raises OutOfMemory."""


BackendMaker = Callable[[EngineConfig, Path, ModelShape, int], Backend]
"""Makes a backend from settings, a checkpoint's directory, the whole model, and the number of processes that share this machine."""
