"""Makes full garbage collections, which stop all of Python for 20 ms and more, while no request is open."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

CHECK_SECONDS = 10.0
"""Interval at which a full collection is considered."""
BUSY_SECONDS = 60.0
"""Seconds after which a server that is never idle collects too, so that the reference cycles of ended requests do not pile up."""
_NEVER = 2**31 - 1


async def collect_when_idle(idle: Callable[[], bool]) -> None:
    """Makes full collections while `idle()`. Until this is cancelled, Python makes none of its own."""
    young, middle, old = thresholds = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    busy_since = time.monotonic()
    try:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if idle() or time.monotonic() - busy_since >= BUSY_SECONDS:
                if gc.get_count()[2] > old:
                    await asyncio.to_thread(gc.collect)
                busy_since = time.monotonic()
    finally:
        gc.set_threshold(*thresholds)
