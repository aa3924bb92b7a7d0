"""Copies the bytes of weights to a device through page-locked memory, read by several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

PIECE, BUFFERS, READERS = 8 << 20, 8, 6
"""Bytes that are read and copied at once; how many of them are in page-locked memory; and threads that read."""

Read = Callable[[memoryview, int], None]
"""Fills the view with bytes from a position on."""


class _Piece(NamedTuple):
    """A piece that a thread reads: its buffer's number, and the part of the result that it is for."""

    buffer: int
    target: torch.Tensor
    read: Future[None]


class Uploads:
    """Copies bytes to a device. Threads fill page-locked buffers, and the device takes what is in one while others are filled.

    The copies are work of the current stream. Nothing here waits for them, except that a buffer is not filled before its last copy is done.
    """

    def __init__(self, device: torch.device, start_copy: Callable[[torch.Tensor, torch.Tensor], torch.cuda.Event] | None = None) -> None:
        """`start_copy` copies to its first argument from its second and returns the end of the copy; tests have their own."""
        self._device, self._start_copy = device, start_copy or _start_copy
        self._buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._next = 0
        self._readers = ThreadPoolExecutor(READERS, "chairlift-weights")

    def copy(self, size: int, read: Read) -> torch.Tensor:
        """Returns `size` bytes on the device, which `read` provides in any order and on several threads. Raises what `read` raises."""
        out = torch.empty(size, dtype=torch.uint8, device=self._device)
        pieces: deque[_Piece] = deque()
        try:
            for start in range(0, size, PIECE):
                if len(pieces) == BUFFERS:
                    self._finish(pieces.popleft())
                pieces.append(self._begin(out[start : start + PIECE], start, read))
            while pieces:
                self._finish(pieces.popleft())
        finally:
            # After an error no thread may still write to a buffer.
            for piece in pieces:
                piece.read.exception()
        return out

    def _begin(self, target: torch.Tensor, start: int, read: Read) -> _Piece:
        at, self._next = self._next, (self._next + 1) % BUFFERS
        if (copied := self._copied[at]) is not None:
            copied.synchronize()
        return _Piece(at, target, self._readers.submit(read, self._buffers[at].numpy().data[: len(target)], start))

    def _finish(self, piece: _Piece) -> None:
        piece.read.result()
        self._copied[piece.buffer] = self._start_copy(piece.target, self._buffers[piece.buffer][: len(piece.target)])


def _start_copy(target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
    target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
