"""The CUDA devices of this machine. Imports torch only where there is a CUDA driver."""

from __future__ import annotations

import ctypes

MIN_CAPABILITY = (8, 0)
"""Lowest compute capability of a device that runs the kernels: Triton has no tensor cores and no bfloat16 below it."""


def has_cuda_driver() -> bool:
    """Whether the CUDA driver is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cuda_devices() -> int:
    """The number of CUDA devices that torch sees. Raises ModuleNotFoundError if there is a driver, but no torch."""
    if not has_cuda_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def compute_capability() -> tuple[int, int]:
    """The compute capability of the first device. There must be one."""
    import torch

    found: tuple[int, int] = torch.cuda.get_device_capability()
    return found


def too_old(capability: tuple[int, int]) -> str | None:
    """Why a device of this compute capability cannot run the kernels; None if it can."""
    if capability >= MIN_CAPABILITY:
        return None
    return f"the device has compute capability {dotted(capability)}, and the kernels need {dotted(MIN_CAPABILITY)}"


def dotted(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it: 8.9."""
    return ".".join(map(str, capability))
