"""Detects a stuck engine: a thread beside its loop checks it once a second and reports to the parent."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from chairlift.engine.frames import Alive

if TYPE_CHECKING:
    from chairlift.engine.step_loop import StepLoop

CHECK_SECONDS = 1.0
"""Seconds between two checks."""
STUCK_SECONDS, STUCK_STEPS = 10.0, 20
"""An engine is stuck after this many seconds in one stage without progress, but not before this many times its predicted step."""
IDLE = "idle"
"""The stage of an engine without work, which may last forever."""


class StallDetector:
    """Counts the seconds for which a value has not changed.

    Time during which this process was stopped or the machine slept does not count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: object = None
        self._at = time.monotonic()

    def check(self, value: object) -> float:
        """Compares the value with the last one and returns `seconds`. Must be called every CHECK_SECONDS."""
        at = time.monotonic()
        self.seconds = self.seconds + min(at - self._at, 2 * CHECK_SECONDS) if value == self._last else 0.0
        self._last, self._at = value, at
        return self.seconds


class Watchdog(threading.Thread):
    """Checks a step loop until `send` raises OSError because the parent has exited.

    If a stage lasts too long without progress, the scheduler's state and all threads' stacks are printed to stderr, once.
    """

    def __init__(self, loop: StepLoop, send: Callable[[Alive], None]) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._loop = loop
        self._send = send
        self._stall = StallDetector()
        self._dumped = False

    def run(self) -> None:
        """The thread's main function."""
        while True:
            time.sleep(CHECK_SECONDS)
            try:
                self._send(self.check())
            except OSError:
                return

    def check(self) -> Alive:
        """Checks the engine once and returns the heartbeat."""
        stage = self._loop.stage
        seconds = self._stall.check((stage, self._loop.progress))
        if stage[0] == IDLE or seconds < self._limit(seconds):
            self._dumped = False
            return Alive()
        if not self._dumped:
            self._dumped = True
            self._dump(stage[0], seconds)
        return Alive(stage[0], seconds)

    def _limit(self, seconds: float) -> float:
        # Counters need the core's lock, so they are only read when the minimum has passed.
        if seconds < STUCK_SECONDS:
            return STUCK_SECONDS
        return max(STUCK_SECONDS, STUCK_STEPS * (self._loop.stats().predicted_step_us / 1e6 or self._loop.first_step))

    def _dump(self, stage: str, seconds: float) -> None:
        state = json.dumps(self._loop.stats().pack(), default=str)
        print(f"the engine is stuck: {seconds:.0f} s in '{stage}'; its scheduler: {state}; its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
