"""What the pages of results have in common."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from peers.machine import describe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benches" / "results"


def machine() -> str:
    """Processor, cores and versions, in one line."""
    found, cores = describe(), len(os.sched_getaffinity(0))
    flags = "AVX-512" if "avx512f" in found["flags"] else "no AVX-512"
    rustc = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout.split()[1]
    return f"{found['cpu']}, {cores} cores, {flags}; rustc {rustc}, Python {platform.python_version()}"


def kernels() -> str:
    """Processor, cores and the CPU kernels that it runs, in one line."""
    from chairlift._core import instruction_sets

    found = describe()
    return f"{found['cpu']}, {found['cores']} cores, {instruction_sets()[0]} kernels"


def write(name: str, lines: Iterable[str]) -> None:
    """Prints a page of results, and writes it to a file of that name."""
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    (RESULTS / name).write_text(text, encoding="utf-8")


def say(text: str) -> None:
    """Prints a line about what goes on."""
    print(text, file=sys.stderr, flush=True)
