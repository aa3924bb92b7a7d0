"""What makes CUDA graphs: notes work as it is launched, to be done again in one go."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

Replay = Callable[[], None]
"""Puts recorded work on the current stream."""


class GraphCapture(Protocol):
    """Makes graphs, of which no two may run at once: what they compute with lies in the same memory."""

    def warm(self, work: Callable[[], object]) -> None:
        """Does the work, so that what is done for the first only is done; raises RuntimeError if it waits for the device."""

    def record(self, work: Callable[[], object]) -> Replay:
        """Notes what `work` launches, without doing it. All that it reads must stay where it is."""


class CudaGraphCapture:
    """The `GraphCapture` of a CUDA device: on a stream of its own, with one pool of memory for all that is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, work: Callable[[], object]) -> None:
        """Does the work twice on the stream that records, which gets its workspaces before there is a graph to keep them in."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            # Asked beforehand, for a device is hard to bring back from a recording that failed.
            with _waiting_raises():
                work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], object]) -> Replay:
        """Notes what `work` launches; other threads may go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: Replay = graph.replay
        return replay


def recorder(device: torch.device) -> GraphCapture | None:
    """What records on a device; None for one that has no graphs."""
    return CudaGraphCapture(device) if device.type == "cuda" else None


@contextmanager
def _waiting_raises() -> Iterator[None]:
    """While it lasts, whatever makes the host wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # "is a prototype feature", torch says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
