"""Signals between a process and its child."""

from __future__ import annotations

import signal
import sys

LEAVE = signal.SIGUSR1
"""The signal at which a process of engines tells the server that it leaves."""


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Lets Linux send this process a signal when the thread that started it ends. Elsewhere it does nothing."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
