"""Starts Python as a child process of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What Ctrl-C, a manager of services and a closed terminal send to all processes of a command: its first process decides what they do."""


def ignore_stops() -> None:
    """Ignores `STOPS`, which a child inherits as blocked: multiprocessing unblocks two of them with its resource tracker."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def start_python(*arguments: str, environment: Mapping[str, str] | None = None, **settings: Any) -> subprocess.Popen[Any]:
    """Starts Python with this process's module path, and `environment` beside this process's own. It does not import from its directory.

    `settings` are those of `subprocess.Popen`. The child inherits `STOPS` as blocked.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # The child could ignore them only after it has imported.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        # When numpy is imported, OpenBLAS's threads otherwise keep all other cores for some 20 ms each, and they are not used.
        variables = {"OPENBLAS_THREAD_TIMEOUT": "4", **os.environ, "PYTHONPATH": path, **(environment or {})}
        return subprocess.Popen([sys.executable, "-P", *arguments], env=variables, **settings)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
