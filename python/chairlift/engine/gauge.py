"""A number that a child process tells its parent, in a file that both have open."""

from __future__ import annotations

import os
import struct
import tempfile

_FORMAT = struct.Struct("d")


def open_gauge() -> int:
    """Opens a file without a name, in which nothing is written yet."""
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def write_gauge(fd: int, value: float) -> None:
    """Sets the number in the open file `fd`."""
    os.pwrite(fd, _FORMAT.pack(value), 0)


def read_gauge(fd: int) -> float | None:
    """The number in the open file `fd`; None while nothing is written."""
    written = os.pread(fd, _FORMAT.size, 0)
    return _FORMAT.unpack(written)[0] if written else None
