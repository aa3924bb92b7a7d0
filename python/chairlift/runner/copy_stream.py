"""Asynchronous copies between host and device."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.runner.buffers import PendingResult, ReadyResult

PAGEABLE = 64 << 10
"""Most bytes that the CUDA driver copies from pageable memory without waiting for queued work."""


class CopyStream:
    """Copies tensors to the host and to the device.

    On CUDA, copies to the host use a stream of their own, so that the next step does not wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def pinned(self, size: int) -> torch.Tensor:
        """Page-locked host memory, int32 [size], for asynchronous copies to the device."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._stream is not None)

    def send(self, array: np.ndarray) -> torch.Tensor:
        """Copies an array to the device without waiting for queued work. The array may change when this returns."""
        tensor = torch.from_numpy(array)
        if array.nbytes > PAGEABLE and self._device.type != "cpu":
            tensor = self._page_locked(tensor)
        return tensor.to(self._device, non_blocking=True)

    def _page_locked(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in page-locked memory, which torch does not use again before it is copied to the device."""
        return tensor.pin_memory()

    def fetch(self, tensor: torch.Tensor) -> PendingResult:
        """Starts an async copy to the host of `tensor`'s value after all work queued so far. Later work must not overwrite it.

        When the copy has arrived, that work is done, even if the tensor is empty.
        """
        if self._stream is None:
            return ReadyResult(tensor.numpy())
        return _PendingCopy(tensor, self._stream)


class _PendingCopy:
    """A copy to page-locked memory and the event that marks its end."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            # torch's allocator reuses page-locked memory, so that a steady state allocates none.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(stream)
        # Keeps the allocator from reusing the tensor's memory before the copy is done.
        tensor.record_stream(stream)

    def numpy(self) -> np.ndarray:
        """Waits for the copy without Python's lock."""
        self._done.synchronize()
        return self._host.numpy()
