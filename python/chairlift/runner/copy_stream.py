"""What crosses between the host and a device while both go on working."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class PendingResult(Protocol):
    """A tensor on its way to the host."""

    def numpy(self) -> np.ndarray:
        """Its numbers, as soon as the device has come to them."""


class ReadyResult:
    """What is on the host already."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        """The array."""
        return self._array


class CopyStream:
    """Brings tensors to the host, on a stream of its own where there is CUDA: the next step's work does not wait for that."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def pinned(self, size: int) -> torch.Tensor:
        """Memory of the host, int32 [size], that the device copies from by itself."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._stream is not None)

    def fetch(self, tensor: torch.Tensor) -> PendingResult:
        """Starts on its way what the work given to the device so far makes of `tensor`, which later work must not overwrite.

        With no elements it is still worth waiting for: when it arrives, all that work is done.
        """
        if self._stream is None:
            return ReadyResult(tensor.numpy())
        return _PendingCopy(tensor, self._stream)


class _PendingCopy:
    """A copy to pinned memory, and the event behind it."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            # The allocator keeps pinned memory for the next one, so that a steady step allocates none.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)
        # Its memory must not go to others of its stream before the copy is done, though nobody holds it.
        tensor.record_stream(stream)

    def numpy(self) -> np.ndarray:
        """Waits for the copy without Python's lock."""
        self._done.synchronize()
        return self._host.numpy()


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies a small array to the device without waiting for what that is at: the array can be changed when this returns.

    Memory that is not pinned is taken by the driver at once. Must not be called with pinned memory, whose copy comes later.
    """
    return torch.from_numpy(array).to(device, non_blocking=True)
