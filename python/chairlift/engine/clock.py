"""The clock of the engine and its clients."""

from __future__ import annotations

import time


def now() -> int:
    """Microseconds of the system's monotonic clock."""
    return time.monotonic_ns() // 1000
