"""Reads bytes at a position of an open file."""

from __future__ import annotations

import os
from typing import IO


def read_at(file: IO[bytes], view: memoryview, start: int) -> bool:
    """Fills the view with the bytes of a file from byte `start` on. Returns False if the file ends before. Threads may call it at once."""
    done = 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], start + done)
        if not count:
            return False
        done += count
    return True
