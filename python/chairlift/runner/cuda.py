"""The CUDA devices of this machine. Imports torch only where there is a CUDA driver."""

from __future__ import annotations

import ctypes


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
