"""Captures and replays CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

CapturedGraph = Callable[[], None]
"""Replays captured work on the current stream."""


class GraphCapture(Protocol):
    """Captures graphs. They share one memory pool, so no two may run at once."""

    def warm(self, work: Callable[[], object]) -> None:
        """Runs `work` eagerly, for its one-time initialisation. Raises RuntimeError if it waits for the device."""

    def record(self, work: Callable[[], object]) -> CapturedGraph:
        """Captures what `work` launches, without running it. Its inputs must keep their addresses."""


class CudaGraphCapture:
    """The `GraphCapture` of a CUDA device, with a stream and a memory pool of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, work: Callable[[], object]) -> None:
        """Runs `work` twice on the capture stream, so that the stream's workspaces are allocated outside a graph's pool."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            # Checked before the capture, because a device is hard to recover from a failed capture.
            with _waiting_raises():
                work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], object]) -> CapturedGraph:
        """Captures what `work` launches. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: CapturedGraph = graph.replay
        return replay


def graph_capture(device: torch.device) -> GraphCapture | None:
    """The graph capture of a device; None if it has no graphs."""
    return CudaGraphCapture(device) if device.type == "cuda" else None


@contextmanager
def _waiting_raises() -> Iterator[None]:
    """Raises RuntimeError if the host waits for the device inside the context."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch: "is a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
