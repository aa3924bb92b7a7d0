"""The parent's side of the watchdog: detects a stuck or silent engine process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from chairlift.engine.frames import Alive
from chairlift.engine.watchdog import CHECK_SECONDS, StallDetector

log = logging.getLogger("chairlift")

SILENT_AFTER = 10.0
"""Seconds without a message after which the engine's process counts as stuck."""
KILL_AFTER = 60.0
"""Seconds after which a stuck engine is killed. One that a signal stopped is killed at once, because it cannot go on by itself."""


class Heartbeat:
    """Receives the heartbeats of a ready engine and calls `kill` if it stays stuck, or if it is silent and `why_hopeless` has a reason."""

    def __init__(self, kill: Callable[[], None], why_hopeless: Callable[[], str | None]) -> None:
        self._kill = kill
        self._why_hopeless = why_hopeless
        self._newest = Alive()
        self._received = 0
        self._silence = StallDetector()
        self._stuck = StallDetector()

    def on_message(self, frame: Alive) -> None:
        """Handles a heartbeat."""
        self._newest = frame
        self._received += 1

    @property
    def stuck(self) -> tuple[str, float] | None:
        """The stage in which the engine is stuck and the seconds since; None if it is not.

        The stage is `plan`, `run` or `commit` of a step, `send`, `intake`, or `process` if its watchdog does not answer either.
        """
        if self._silence.seconds > SILENT_AFTER:
            return "process", self._silence.seconds
        return None if self._newest.stage is None else (self._newest.stage, self._newest.seconds)

    async def watch(self) -> None:
        """Checks the engine every CHECK_SECONDS until it is killed."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._silence.check(self._received)
            stage, seconds = self.stuck or (None, 0.0)
            since = self._stuck.check(stage)
            if stage is None:
                continue
            if not since:
                log.error("the engine is stuck: %.0f s in '%s'", seconds, stage)
            hopeless = self._why_hopeless() if stage == "process" else None
            if hopeless or since > KILL_AFTER:
                log.error("%s: killing its process", hopeless or f"the engine is still stuck in '{stage}'")
                self._kill()
                return
