"""Measures the event loop: the callback that took most CPU time, how late timers run, and the time of each request's callbacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Histogram, Metric
from prometheus_client.registry import Collector

from chairlift.server.observability.engine_metrics import gauge
from chairlift.server.work import CURRENT_WORK

WINDOW = 60.0
"""The longest callback is that of the last one to two times this many seconds."""

_SLOW = 0.005
"""Seconds of wall time above which a callback's CPU time is looked at: reading that clock takes 0.3 to 2 microseconds."""

_PRECISION = 0.001
"""Seconds by which the CPU time of a callback may be too high."""

_LAG = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_handle_class: Any = asyncio.Handle
_run = _handle_class._run
_monitors: dict[asyncio.AbstractEventLoop, LoopMonitor] = {}


class LoopMonitor(Collector):
    """Measures each callback of the running event loop, from `start` to `stop`.

    The interpreter runs every callback by `asyncio.Handle._run`, which this replaces: asyncio's own debug mode is many times slower.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        """`labels` are those that all metrics have."""
        self._labels = labels
        self._loop: asyncio.AbstractEventLoop | None = None
        self._window_ends = 0.0
        self._longest, self._before = (0.0, ""), (0.0, "")
        self._next_mark = self._cpu_mark = 0.0
        help = "How late timers of the event loop ran."
        self._lag_family = Histogram("chairlift_event_loop_lag_seconds", help, list(labels), registry=None, buckets=_LAG)
        self._lag = self._lag_family.labels(**labels)

    def start(self) -> None:
        """Measures the running event loop from now on."""
        self._loop = asyncio.get_running_loop()
        _monitors[self._loop] = self
        _handle_class._run = _measured_run

    def stop(self) -> None:
        """Measures no longer."""
        if self._loop is not None:
            _monitors.pop(self._loop, None)
            self._loop = None
        if not _monitors:
            _handle_class._run = _run

    @property
    def longest(self) -> tuple[float, str]:
        """CPU time in seconds of the longest callback in the window, 0 if none was slow, and its name."""
        self._turn(time.perf_counter())
        return max(self._longest, self._before)

    def reset(self) -> None:
        """Forgets the longest callback."""
        self._longest = self._before = (0.0, "")

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        seconds, name = self.longest
        help = "CPU time of the longest callback of the event loop in the last minute or two, with its name; 0 if none took 5 ms."
        yield gauge("event_loop_longest_callback_seconds", help, self._labels, {name: seconds}, "callback")
        yield from self._lag_family.collect()

    def measure(self, handle: Any) -> None:
        """Runs a callback."""
        began = time.perf_counter()
        if began >= self._next_mark:
            self._next_mark, self._cpu_mark = began + _PRECISION, time.thread_time()
        if type(handle) is asyncio.TimerHandle and self._loop is not None:
            self._lag.observe(max(0.0, self._loop.time() - handle.when()))
        _run(handle)
        ended = time.perf_counter()
        if (work := handle._context.get(CURRENT_WORK)) is not None:
            work.seconds += ended - began
        if ended - began >= _SLOW:
            self._turn(ended)
            self._longest = max(self._longest, (time.thread_time() - self._cpu_mark, _name(handle)))
            self._next_mark = 0.0

    def _turn(self, now: float) -> None:
        """Begins a new window if it is time."""
        if now >= self._window_ends:
            self._before = self._longest if now < self._window_ends + WINDOW else (0.0, "")
            self._longest, self._window_ends = (0.0, ""), now + WINDOW


def _measured_run(handle: Any) -> None:
    monitor = _monitors.get(handle._loop)
    if monitor is None:
        _run(handle)
    else:
        monitor.measure(handle)


def _name(handle: Any) -> str:
    """Returns the name of a callback: a task's own name, or that of its coroutine, or that of the function."""
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return getattr(callback, "__qualname__", None) or type(callback).__name__
    if not owner.get_name().startswith("Task-"):
        return owner.get_name()
    return getattr(owner.get_coro(), "__qualname__", type(owner).__name__)
