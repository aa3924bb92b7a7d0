"""Drops the pages of files whose contents were packed from the system's cache."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from chairlift.machine import available_memory


class FilePages:
    """The parts of files that are read to be packed.

    A file that does not fit in memory beside its packed copy would push out other programs' pages, so its pages are dropped as soon as they
    are packed. Pages of smaller files stay in the cache: the next start is faster with them.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        sizes = {file: file.stat().st_size for file in files}
        self._drops = hasattr(os, "posix_fadvise") and 2 * sum(sizes.values()) > available_memory()
        self._read: list[tuple[Path, int, int]] = []

    def add(self, file: Path, start: int, size: int) -> None:
        """Notes that a part of a file is going to be read."""
        if self._drops:
            self._read.append((file, start, size))

    def drop(self) -> None:
        """Drops the parts that were noted, which must have been read."""
        for file, start, size in self._read:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        self._read.clear()
