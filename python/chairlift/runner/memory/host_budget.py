"""Divides the host's memory between a step and the KV cache. Without torch."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.config import EngineConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.memory.machine import available_memory
from chairlift.runner.memory.precision import Precision
from chairlift.runner.memory.sizing import Size, StepSize, fit


class HostBudget:
    """Divides the host's memory."""

    def __init__(self, processes: int) -> None:
        """`processes` is the number of processes that share this machine's memory."""
        self._processes = processes

    def check(self, config: EngineConfig, model: ModelShape, precision: Precision) -> None:
        """Does nothing: `precision.decide` has checked that the weights fit."""

    def fit(self, config: EngineConfig, model: ModelShape, precision: Precision, run: Callable[[StepSize], None]) -> Size:
        """Sizes a step and the KV cache. Swapped-out blocks are in the same memory as the cache."""
        return fit(config, model, precision.kv, max(0, available_memory() // self._processes - config.swap_space))
