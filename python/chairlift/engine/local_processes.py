"""Engine processes that share this machine: each gets its part of the cores, or CUDA devices of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.machine import usable_cores

if TYPE_CHECKING:
    from chairlift.engine.engine_process import EngineProcess

GPUS = Path("/proc/driver/nvidia/gpus")
"""Has a directory for each NVIDIA device, where the driver is loaded."""


def local_processes(config: EngineConfig, count: int, *, exclusive: bool) -> list[EngineProcess]:
    """Makes `count` processes for engines with these settings; `exclusive` if each runs one engine. Raises as `environments`."""
    from chairlift.engine.engine_process import EngineProcess  # imports asyncio

    return [EngineProcess(config.load_format, exclusive=exclusive, environment=one) for one in environments(config, count)]


def environments(config: EngineConfig, count: int) -> list[dict[str, str]]:
    """Returns the variables of `count` processes for engines with these settings, beside those of this process.

    Raises InvalidSetting if there are CUDA devices, but fewer than needed.
    """
    devices = [] if config.device == "cpu" or config.runner == "rust" else visible_devices()
    each = config.tensor_parallel_size
    if count > 1 and devices and len(devices) < count * each:
        raise InvalidSetting(f"--replicas {count} needs {count * each} CUDA devices and there are {len(devices)} (or use --device cpu)")
    if count == 1 or not devices:
        return [{} for _ in range(count)]
    parts = [",".join(devices[number * each : (number + 1) * each]) for number in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": part} for part in parts]


def share_cores(config: EngineConfig, count: int) -> EngineConfig:
    """The settings of one of `count` engines that run at a time: with its part of the cores, unless the threads are chosen."""
    if count == 1 or config.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return config
    return replace(config, threads=max(1, usable_cores() // count))


def visible_devices() -> list[str]:
    """The CUDA devices that processes may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device for device in chosen.split(",") if device]
    return [str(number) for number in range(len(list(GPUS.iterdir())))] if GPUS.is_dir() else []
