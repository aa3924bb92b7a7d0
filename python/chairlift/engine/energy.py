"""Meters of the energy that the machine takes: Linux's powercap counters, and NVIDIA's NVML."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from chairlift.errors import InvalidSetting, pip_install_with_torch

if TYPE_CHECKING:
    import numpy as np

    from chairlift import _core

POLL_SECONDS = 60.0
"""Longest time between two readings of powercap counters. They start over after minutes at full load, and an idle engine does not read."""
METER_SECONDS = 1.0
"""Interval at which an engine reads its meter while no request ends."""


class EnergyMeter(Protocol):
    """Measures energy. `method` is its name in usage: `powercap` or `nvml`."""

    method: str

    def read(self) -> int:
        """The microjoules since the meter was opened."""

    def close(self) -> None:
        """Releases what the meter holds."""


def open_meter(setting: str, devices: int) -> EnergyMeter | None:
    """Opens the meter of `--energy-meter`; None for `none`. `nvml` reads that many devices. Raises InvalidSetting if it cannot be read."""
    kind, _, directory = setting.partition(":")
    if kind == "powercap":
        return PowercapMeter(Path(directory))
    if kind == "nvml":
        return NvmlMeter(devices)
    return None


class EnergyAccount:
    """Gives a scheduler the energy since the last reading of its engine's meter, before a sequence ends, so that its timeline has it.

    Does nothing without a meter. Times are microseconds.
    """

    def __init__(self, meter: EnergyMeter | None, scheduler: _core.Scheduler) -> None:
        self._meter, self._scheduler = meter, scheduler
        self._last, self._due = 0, 0

    def read(self, now: int) -> None:
        """Reads the meter."""
        if self._meter is not None:
            energy = self._meter.read()
            self._scheduler.read_meter(energy - self._last, now)
            self._last, self._due = energy, now + int(METER_SECONDS * 1e6)

    def read_before_commit(self, plan: _core.StepPlan, tokens: np.ndarray, now: int) -> None:
        """Reads the meter if the commit of these tokens may end a sequence, and at intervals."""
        if self._meter is not None and (now >= self._due or self._scheduler.may_end(plan, tokens)):
            self.read(now)

    def close(self) -> None:
        """Closes the meter."""
        if self._meter is not None:
            self._meter.close()


class PowercapMeter:
    """The sum of the counters `energy_uj` of the zones in a directory, such as /sys/class/powercap.

    Zones within a zone (`intel-rapl:0:1`) are part of it and are not added again. The counters start over at `max_energy_range_uj`.
    """

    method = "powercap"

    def __init__(self, directory: Path) -> None:
        """Opens the counters; raises InvalidSetting if there are none, or they cannot be read."""
        self._lock = threading.Lock()
        self._total = 0
        self._counters: list[tuple[int, int]] = []  # file, range
        try:
            for zone in _zones(directory):
                file = os.open(zone / "energy_uj", os.O_RDONLY | os.O_CLOEXEC)
                self._counters.append((file, int((zone / "max_energy_range_uj").read_text()) + 1))
            self._last = [_value(file) for file, _ in self._counters]
        except (OSError, ValueError) as error:
            self._close_files()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            where = error.filename if isinstance(error, OSError) and error.filename else directory
            raise InvalidSetting(f"--energy-meter powercap: {where}: {reason}") from None
        if not self._counters:
            raise InvalidSetting(f"--energy-meter powercap:{directory}: no zone there has a counter energy_uj")
        self._stopped = threading.Event()
        threading.Thread(target=self._poll, name="energy", daemon=True).start()

    def read(self) -> int:
        """The microjoules since the meter was opened."""
        with self._lock:
            for at, (file, size) in enumerate(self._counters):
                value = _value(file)
                self._total += (value - self._last[at]) % size
                self._last[at] = value
            return self._total

    def close(self) -> None:
        """Closes the counters."""
        self._stopped.set()
        with self._lock:
            self._close_files()

    def _poll(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            self.read()

    def _close_files(self) -> None:
        while self._counters:
            os.close(self._counters.pop()[0])


def _zones(directory: Path) -> list[Path]:
    """The zones that are part of no other zone: `NAME:0`, and not `NAME:0:1`; the directory itself if it is a zone."""
    if (directory / "energy_uj").exists():
        return [directory]
    return sorted(zone for zone in directory.iterdir() if zone.name.count(":") == 1 and (zone / "energy_uj").exists())


def _value(file: int) -> int:
    return int(os.pread(file, 32, 0))


class NvmlMeter:
    """The energy counters of the first NVIDIA devices that CUDA sees, by the package nvidia-ml-py. Volta and later have one."""

    method = "nvml"

    def __init__(self, devices: int) -> None:
        """Opens the counters; raises InvalidSetting if the package or a counter is missing."""
        try:
            import pynvml
        except ImportError:
            raise InvalidSetting(f"--energy-meter nvml needs nvidia-ml-py: {pip_install_with_torch('nvml')}") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            # NVML lists all devices, also those that CUDA_VISIBLE_DEVICES hides.
            names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
            self._devices = [self._device(name) for name in names.split(",")[:devices]]
            self._first = self._counted()
        except pynvml.NVMLError as error:
            raise InvalidSetting(f"--energy-meter nvml: {error}") from None

    def read(self) -> int:
        """The microjoules since the meter was opened; the counters have millijoules."""
        return 1000 * (self._counted() - self._first)

    def _device(self, name: str) -> object:
        by_index = name.isdigit()
        return self._nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _counted(self) -> int:
        return sum(int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(device)) for device in self._devices)

    def close(self) -> None:
        """Shuts NVML down."""
        self._nvml.nvmlShutdown()
