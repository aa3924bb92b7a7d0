"""A device's memory: what there is, what torch has of it, and what is said where it does not suffice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from chairlift.errors import OutOfMemory

_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What errors say that come of too little memory and are no torch.OutOfMemoryError: pinned memory, and libraries beside torch."""


class Memory(NamedTuple):
    """A device's memory at one time, in bytes."""

    total: int
    free: int
    """Taken by nobody: neither this process nor another."""
    ours: int
    """Taken by torch's allocator in this process, whether or not a tensor lies there."""
    tensors: int
    """Of that, where tensors lie."""
    peak: int
    """The most that tensors took at once since `DeviceMemory.watch`."""

    @property
    def others(self) -> int:
        """Taken by other processes, and in this one by all but torch's allocator: the driver's context, kernels, NCCL."""
        return self.total - self.free - self.ours


class DeviceMemory(Protocol):
    """The memory of the device that a model is on."""

    def read(self) -> Memory:
        """How it is now, with all work done that the device was given, and nothing kept for later."""

    def watch(self) -> None:
        """Begins to look for the peak."""

    def trim(self) -> None:
        """Gives back what torch keeps for later tensors."""


class CudaMemory:
    """That of a CUDA device, of which this process may have others at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Memory:
        """How it is now."""
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        self.trim()
        free, total = torch.cuda.mem_get_info(self._device)
        return Memory(total, free, torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device), peak)

    def watch(self) -> None:
        """Begins to look for the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def trim(self) -> None:
        """Gives back what torch keeps for later tensors."""
        torch.cuda.empty_cache()


def is_shortage(error: BaseException) -> bool:
    """Whether torch raised this for want of a device's memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextlib.contextmanager
def raise_out_of_memory(what: str = "") -> Iterator[None]:
    """Raises OutOfMemory, with `what` said before, in the place of what torch raises within for want of a device's memory.

    `what` is said before an OutOfMemory from within as well.
    """
    try:
        yield
    except (RuntimeError, OutOfMemory) as error:
        if not isinstance(error, OutOfMemory) and not is_shortage(error):
            raise
        # Torch's own text goes on for lines about its settings.
        raise OutOfMemory(what + str(error).split(" If reserved but unallocated")[0].splitlines()[0]) from None
