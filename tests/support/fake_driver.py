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
    # In Triton 3.4 `run` is no property, and `active` is no other's value.
    monkeypatch.setattr(CompiledKernel, "run", property(run), raising=False)
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", FakeDriver())
    return launches
