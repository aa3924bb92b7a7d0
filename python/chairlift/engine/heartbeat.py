"""The parent's side of the watchdog: what the engine's process says of itself, and what its silence says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from chairlift.engine.frames import Alive
from chairlift.engine.watchdog import LOOK, StallDetector

log = logging.getLogger("chairlift")

SILENT_AFTER = 10.0
"""Seconds after which an engine's process that says nothing is stuck as a whole."""
KILL_AFTER = 60.0
"""Seconds for which an engine may be stuck before it is given up."""


class Heartbeat:
    """Hears an engine that is ready, and `kill`s one that stays stuck."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._newest = Alive()
        self._heard = 0
        self._silence = StallDetector()
        self._stuck = StallDetector()

    def hear(self, frame: Alive) -> None:
        """Takes a word from the engine."""
        self._newest = frame
        self._heard += 1

    @property
    def stuck(self) -> tuple[str, float] | None:
        """The stage in which the engine is stuck, and for how many seconds; None while it gets on.

        The stage is `plan`, `run` or `commit` of a step, `send`, `intake`, or `process` where not even its watchdog answers.
        """
        if self._silence.seconds > SILENT_AFTER:
            return "process", self._silence.seconds
        return None if self._newest.stage is None else (self._newest.stage, self._newest.seconds)

    async def watch(self) -> None:
        """Looks for ever, or until the engine was given up."""
        while True:
            await asyncio.sleep(LOOK)
            self._silence.look(self._heard)
            stage, seconds = self.stuck or (None, 0.0)
            since = self._stuck.look(stage)
            if stage is None:
                continue
            if not since:
                log.error("the engine is stuck: %.0f s in '%s'", seconds, stage)
            if since > KILL_AFTER:
                log.error("the engine is still stuck in '%s': killing its process", stage)
                self._kill()
                return
