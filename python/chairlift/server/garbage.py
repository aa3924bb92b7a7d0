"""Full garbage collections, which stop all of Python for 20 ms and more, at times when they delay nobody."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

LOOK_SECONDS = 10.0
"""Interval at which a full collection is considered."""
BUSY_SECONDS = 60.0
"""Seconds after which a server that is never idle makes one all the same, so that what ended requests leave does not pile up."""
_NEVER = 2**31 - 1


async def collect_when_idle(idle: Callable[[], bool]) -> None:
    """Makes full collections while `idle()`, until it is cancelled; meanwhile Python makes none by itself."""
    young, middle, old = thresholds = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    busy_since = time.monotonic()
    try:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if idle() or time.monotonic() - busy_since >= BUSY_SECONDS:
                if gc.get_count()[2] > old:
                    await asyncio.to_thread(gc.collect)
                busy_since = time.monotonic()
    finally:
        gc.set_threshold(*thresholds)
