"""Starts Python as a child process of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def start_python(*arguments: str, environment: Mapping[str, str] | None = None, **settings: Any) -> subprocess.Popen[Any]:
    """Starts Python with this process's module path, and `environment` beside this process's own. It does not import from its directory.

    `settings` are those of `subprocess.Popen`. The child inherits SIGINT as blocked.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # Ctrl-C in a terminal also reaches the child, which cannot ignore it before it has imported.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", *arguments], env={**os.environ, "PYTHONPATH": path, **(environment or {})}, **settings
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
