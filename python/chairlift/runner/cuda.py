"""The CUDA devices of this machine. Imports torch only where there is a CUDA driver."""

from __future__ import annotations

import os
from importlib import util
from pathlib import Path
from typing import NamedTuple

from chairlift.errors import InvalidSetting, pip_install_with_torch

MIN_CAPABILITY = (8, 0)
"""Lowest compute capability of a device that runs the kernels: Triton has no tensor cores and no bfloat16 below it."""


DEVICE_FILE = Path("/dev/nvidiactl")
"""A file of the kernel driver where a process may use a device. WSL has none."""
WSL = Path("/dev/dxg")
"""A file of WSL, with which the CUDA driver reaches a device of Windows. Devices of other makers have it too."""
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
"""Describes the kernel driver. Containers see it even if they may use no device."""


class NoDevice(NamedTuple):
    """Why there is no CUDA device to use. A fault must not lead to the CPU unless the user chooses it: it is too slow for large models."""

    text: str
    is_fault: bool


def has_cuda_driver() -> bool:
    """Whether the CUDA driver is installed."""
    import ctypes  # a server on a CPU does not need it

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_device(device: str, runner: str, processes: int) -> None:
    """Raises InvalidSetting for settings of a start that need a CUDA driver or torch, where there is none. Imports neither."""
    if device == "cuda" and not has_cuda_driver():
        raise InvalidSetting(f"--device cuda: {why_no_device().text} (use --device cpu for the CPU)")
    flag = "--runner torch" if runner == "torch" else "--tensor-parallel-size" if processes > 1 else None
    if flag is not None and util.find_spec("torch") is None:
        raise InvalidSetting(f"{flag} needs torch: {pip_install_with_torch()}")


def cuda_devices() -> int:
    """The number of CUDA devices that torch sees. Raises ModuleNotFoundError if there is a driver, but no torch."""
    if not has_cuda_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_no_device() -> NoDevice:
    """Why `cuda_devices` is 0, and what to do about it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return NoDevice("CUDA_VISIBLE_DEVICES hides all CUDA devices", False)
    has_library = has_cuda_driver()
    if not (DEVICE_FILE.exists() or (has_library and WSL.exists())):
        if not KERNEL_DRIVER.exists():
            return NoDevice("there is no CUDA device", False)
        return NoDevice("this machine has an NVIDIA driver, but no device may be used here (docker run needs --gpus all)", False)
    if not util.find_spec("torch"):
        return NoDevice(f"torch is not installed (for CUDA devices: {pip_install_with_torch()})", False)
    if not has_library:
        return NoDevice(
            "the NVIDIA kernel driver is loaded, but libcuda.so.1 is not found: install the driver's libraries (libnvidia-compute, or the "
            "NVIDIA Container Toolkit on a container's host)",
            True,
        )
    return NoDevice(_why_torch_sees_none(), True)


def _why_torch_sees_none() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs: install one for CUDA (pip install --force-reinstall torch)"
    supported, needed = driver_cuda(), tuple(map(int, torch.version.cuda.split(".")[:2]))
    # A driver supports all minor versions of its major version.
    if supported is not None and supported[0] < needed[0]:
        return (
            f"the NVIDIA driver supports CUDA {dotted(supported)}, and torch {torch.__version__} needs CUDA {needed[0]}: update the "
            f"driver, or install torch for CUDA {supported[0]} (https://pytorch.org/get-started/locally)"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    # torch raises errors of several types, and asserts.
    except Exception as error:
        return f"torch cannot use the CUDA device ({(str(error).strip() or type(error).__name__).splitlines()[0]:.200}): see `nvidia-smi`"
    return "torch sees no CUDA device: see `nvidia-smi`"


def driver_cuda() -> tuple[int, int] | None:
    """The newest version of CUDA that the driver supports; None if it does not say."""
    import ctypes

    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


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
