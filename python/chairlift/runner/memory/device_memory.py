"""Memory of the device that runs a model, and out-of-memory errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from chairlift.errors import OutOfMemory
from chairlift.machine import available_memory

_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages of out-of-memory errors that are not a torch.OutOfMemoryError: from pinned memory and from CUDA libraries."""


class Memory(NamedTuple):
    """A device's memory at one moment, in bytes."""

    total: int
    free: int
    """Bytes that no process has allocated."""
    ours: int
    """Reserved by torch's allocator in this process."""
    tensors: int
    """The part of `ours` that is allocated to tensors."""
    peak: int
    """Peak of `tensors` since `DeviceMemory.watch`."""

    @property
    def others(self) -> int:
        """Allocated by other processes and outside torch's allocator in this one: the driver's context, kernels, NCCL."""
        return self.total - self.free - self.ours


class DeviceMemory(Protocol):
    """The memory of the device that a model is on."""

    def read(self) -> Memory:
        """Waits for the device, returns memory that torch holds in reserve, and reads the device's memory."""

    def watch(self) -> None:
        """Resets the peak."""

    def trim(self) -> None:
        """Returns memory that torch holds in reserve."""


class HostMemory:
    """The memory of the host. torch's share of it is not known."""

    def read(self) -> Memory:
        """Reads the available memory."""
        available = available_memory()
        return Memory(available, available, 0, 0, 0)

    def watch(self) -> None:
        """Does nothing."""

    def trim(self) -> None:
        """Does nothing."""


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Memory:
        """Waits for the device, returns memory that torch holds in reserve, and reads the device's memory."""
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        self.trim()
        free, total = torch.cuda.mem_get_info(self._device)
        return Memory(total, free, torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device), peak)

    def watch(self) -> None:
        """Resets the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def trim(self) -> None:
        """Returns memory that torch holds in reserve."""
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised this because a device is out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextlib.contextmanager
def raise_out_of_memory(prefix: str = "") -> Iterator[None]:
    """Turns torch's out-of-memory errors into OutOfMemory, with `prefix` before the message; an OutOfMemory gets the prefix too."""
    try:
        yield
    except (RuntimeError, OutOfMemory) as error:
        if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
            raise
        # torch's message continues with advice about its settings.
        raise OutOfMemory(prefix + str(error).split(" If reserved but unallocated")[0].splitlines()[0]) from None
