"""A driver without a device: kernels are compiled for an H100, and launches are recorded instead."""

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver


class FakeDriver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Kernels, grids and arguments of all launches from now on."""
    launches: list[tuple[object, ...]] = []

    def run(kernel: CompiledKernel) -> object:
        # After the grid come the stream, the function, metadata and two hooks.
        return lambda *given: launches.append((kernel.hash, given[:3], given[8:]))

    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: None)
    monkeypatch.setattr(CompiledKernel, "run", property(run))
    monkeypatch.setattr(driver, "_active", FakeDriver())
    return launches
