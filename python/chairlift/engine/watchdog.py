"""Is the engine getting on? A thread beside its loop looks once a second, and tells the parent."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from chairlift.engine.frames import Alive

LOOK = 1.0
"""Seconds between two looks."""
PATIENCE, STEPS = 10.0, 20
"""An engine is stuck after so many seconds in one stage, but not before it took so many times as long as its step should."""
IDLE = "idle"
"""The stage of an engine that has nothing to run: it may last for ever."""


class Watched(Protocol):
    """What there is to look at."""

    stage: tuple[str, float]
    """What the engine is doing, and since when on any clock: a new one each time."""

    def stats(self) -> dict[str, Any]:
        """The newest counters, `predicted_step_us` among them."""


class StallDetector:
    """For how many seconds something has not changed, as far as this process was awake to see that.

    A process that was stopped, or a machine that slept, finds that more time has passed than anybody can have used.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._seen: object = None
        self._at = time.monotonic()

    def look(self, now: object) -> float:
        """Takes what it is now; to be called every `LOOK` seconds. Returns `seconds`."""
        at = time.monotonic()
        self.seconds = self.seconds + min(at - self._at, 2 * LOOK) if now == self._seen else 0.0
        self._seen, self._at = now, at
        return self.seconds


class Watchdog(threading.Thread):
    """Looks at `engine` until `tell` raises OSError, which means that the parent has gone.

    `first` is how long a step may be expected to take, in seconds, while the engine's own prediction is 0: that of its first one.
    When a stage lasts too long, the scheduler's state and every thread's stack go to stderr, once.
    """

    def __init__(self, engine: Watched, tell: Callable[[Alive], None], first: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._engine = engine
        self._tell = tell
        self._first = first
        self._stillness = StallDetector()
        self._dumped = False

    def run(self) -> None:
        """The thread's work."""
        while True:
            time.sleep(LOOK)
            try:
                self._tell(self.look())
            except OSError:
                return

    def look(self) -> Alive:
        """Looks once, and says what the parent is to know."""
        now = self._engine.stage
        seconds = self._stillness.look(now)
        if now[0] == IDLE or seconds < self._patience(seconds):
            self._dumped = False
            return Alive()
        if not self._dumped:
            self._dumped = True
            self._dump(now[0], seconds)
        return Alive(now[0], seconds)

    def _patience(self, seconds: float) -> float:
        # Counters cost a little, and the core's lock: they are asked for when it matters.
        if seconds < PATIENCE:
            return PATIENCE
        return max(PATIENCE, STEPS * (self._engine.stats().get("predicted_step_us", 0) / 1e6 or self._first))

    def _dump(self, stage: str, seconds: float) -> None:
        state = json.dumps(self._engine.stats(), default=str)
        print(f"the engine is stuck: {seconds:.0f} s in '{stage}'; its scheduler: {state}; its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
