"""Full garbage collections, which stop all of Python for 20 ms and more, at times when they delay nobody."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

LOOK_SECONDS = 10.0
"""Interval at which a full collection is considered."""
BUSY_SECONDS = 60.0
"""Seconds after which one is made although requests are open, so that what ended requests leave does not pile up."""
_NEVER = 2**31 - 1


async def collect_when_idle(idle: Callable[[], bool]) -> None:
    """Makes full collections while `idle()`, until it is cancelled; meanwhile Python makes none by itself."""
    young, middle, old = thresholds = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    newest = time.monotonic()
    try:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            due = gc.get_count()[2] > old
            if due and (idle() or time.monotonic() - newest >= BUSY_SECONDS):
                await asyncio.to_thread(gc.collect)
                newest = time.monotonic()
    finally:
        gc.set_threshold(*thresholds)
