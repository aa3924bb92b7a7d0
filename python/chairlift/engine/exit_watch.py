"""Reports the death of a process before the kernel has freed its memory, on Linux 6.9 and later.

The socket of a killed process closes only after the process's memory is freed, which takes up to a second for a model. A pidfd of a thread
becomes readable as soon as that thread has exited. The last thread to exit frees the memory first, and the kernel reports the main thread's
exit together with the last thread's. The child therefore starts two threads for this purpose: at least one of them is reported at once.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

PIDFD_THREAD = os.O_EXCL
"""Linux's flag for a pidfd of one thread; Python has no name for it."""


def start_sentinels() -> list[int]:
    """Starts two threads that wait until this process ends; returns their ids for the parent's `ExitWatch`."""
    threads = [threading.Thread(target=threading.Event().wait, name="sentinel", daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    return [thread.native_id for thread in threads if thread.native_id is not None]


class ExitWatch:
    """Calls `on_exit` in the event loop when one of the watched threads has exited. Does nothing on a system without this feature."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._pidfds: list[int] = []

    def watch(self, threads: Iterable[int]) -> None:
        """Begins to watch these threads of a child process."""
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            return
        for thread in threads:
            with suppress(OSError):  # an older Linux, or the thread has exited and the socket will close
                pidfd = os.pidfd_open(thread, PIDFD_THREAD)
                self._pidfds.append(pidfd)
                self._loop.add_reader(pidfd, self._exited)

    def close(self) -> None:
        """Stops watching. May be called repeatedly."""
        while self._pidfds:
            pidfd = self._pidfds.pop()
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def _exited(self) -> None:
        self.close()
        self._on_exit()
