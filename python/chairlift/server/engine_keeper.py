"""Keeps the engine of one model running: restarts it when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from chairlift.server.model import ServedModel

logger = logging.getLogger(__name__)

MAX_RESTART_DELAY = 60
"""Maximum seconds between two attempts to restart the engine; the first restart is immediate."""

STABLE_SECONDS = 60
"""An engine that ran this long counts as stable: if it dies, the next restart is immediate again."""


class EngineKeeper:
    """The owner of one model's engine while the model is loaded."""

    def __init__(self, model: ServedModel, on_crash: Callable[[BaseException], None]) -> None:
        """`on_crash` is called with an error of the keeper itself, which can restart the engine no more."""
        self._model = model
        self._on_crash = on_crash
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the engine and watches it; raises what `AsyncEngine.start` raises."""
        await self._model.engine.start()
        self.watch()

    def watch(self) -> None:
        """Watches an engine that has been started: it is restarted whenever it dies."""
        self._mark_ready()
        self._restarting = asyncio.create_task(self._restart_loop())
        self._restarting.add_done_callback(self._ended)

    def unwatch(self) -> None:
        """Restarts the engine no more."""
        if self._restarting is not None:
            self._restarting.cancel()

    async def stop(self) -> None:
        """Closes the engine. May be called repeatedly."""
        self.unwatch()
        if self._restarting is not None:
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self._model.engine.close()

    def _mark_ready(self) -> None:
        """Marks the model as ready, unless the engine has already died again."""
        if self._model.engine.ready:
            self._model.lifecycle.ready()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)

    async def _restart_loop(self) -> None:
        """Restarts the engine whenever it dies, forever."""
        engine, lifecycle = self._model.engine, self._model.lifecycle
        failures = 0
        while True:
            since = time.monotonic()
            await engine.ended()
            if time.monotonic() - since > STABLE_SECONDS:
                failures = 0
            delay = restart_delay(failures)
            failures += 1
            logger.error("the engine of %s died: restarting it %s", self._model.name, f"in {delay} s" if delay else "now")
            lifecycle.start_scheduled(delay)
            await engine.close()
            await asyncio.sleep(delay)
            try:
                await engine.start()
            except Exception as error:
                lifecycle.start_failed()
                logger.error("the engine of %s could not be started: %s: %s", self._model.name, type(error).__name__, error)
            else:
                logger.info("the engine of %s is ready again, %d requests waited for it", self._model.name, lifecycle.held_requests)
                self._mark_ready()


def restart_delay(failures: int) -> int:
    """Seconds to wait before the next restart, after `failures` engines in a row that died early: 0, 1, 2, 4 and so on."""
    return min(1 << (failures - 1), MAX_RESTART_DELAY) if failures else 0
