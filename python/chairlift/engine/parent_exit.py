"""Ends a child process with its parent."""

from __future__ import annotations

import signal
import sys


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Lets Linux send this process a signal when the thread that started it ends. Elsewhere it does nothing."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
