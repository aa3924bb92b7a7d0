"""Compiles kernels ahead: runs later parts of a script beside it, for Triton's cache. Compilation takes most of a first run's time."""

from __future__ import annotations

import atexit
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import common


class Ahead:
    """Processes that each run a part of a script whose results are not used."""

    def __init__(self, run: common.Run, script: str, parts: Iterable[str]) -> None:
        """Starts them. None are started for parts that are done, in a dry run, on small devices, or if `--only` selects parts."""
        self._folder = tempfile.TemporaryDirectory()
        self.children: list[subprocess.Popen[bytes]] = []
        atexit.register(self.end)
        run.at_end.append(self.end)
        if run.dry or run.small or run.only:
            return
        for part in parts:
            if run.results.ends.get(part) != "done":
                command = [sys.executable, script, "--only", part, "--minutes", f"{run.seconds / 60:.2f}"]
                command += ["--out", str(Path(self._folder.name, part))]
                self.children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def end(self, seconds: float = 0.0) -> None:
        """Waits for them for so long, and then ends those that are left."""
        deadline = time.monotonic() + seconds
        for child in self.children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self.children = []
        self._folder.cleanup()
