"""Counts the time that the server itself works for each request: callbacks of the event loop, threads, and reading from the connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from chairlift.template_process import JOB_TIME

P = ParamSpec("P")
R = TypeVar("R")


class Work:
    """The time that a request has taken of the server's own."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds of the event loop, and of processor time in threads and in child processes that render chat templates."""


CURRENT_WORK: ContextVar[Work | None] = ContextVar("work", default=None)
"""Where the time of this task's request is counted."""

WORK = "work"
"""Key in an ASGI scope's state: the request's `Work`, with the time that reading its first part took."""


class WorkThreads(ThreadPoolExecutor):
    """Threads whose processor time, with that of their work in child processes, counts for the request that calls them."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Calls a function in a thread."""
        if (work := CURRENT_WORK.get()) is None:
            return super().submit(fn, *args, **kwargs)

        def call() -> R:
            began = time.thread_time() + JOB_TIME.seconds
            try:
                return fn(*args, **kwargs)
            finally:
                # Several threads may do this at a time; the little that is lost then does not matter.
                work.seconds += time.thread_time() + JOB_TIME.seconds - began

        return super().submit(call)
