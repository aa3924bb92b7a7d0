"""Keeps the engines of one model running: restarts each when it dies, or when the operator asks for it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from chairlift.engine.background import cancel
from chairlift.server.model import ServedModel

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.engine.engine_process import EngineProcess
    from chairlift.engine.replica import Replica

logger = logging.getLogger(__name__)

MAX_RESTART_DELAY = 60
"""Maximum seconds between two attempts to restart an engine; the first restart is immediate."""

STABLE_SECONDS = 60
"""An engine that ran this long counts as stable: if it dies, the next restart is immediate again."""


class EngineKeeper:
    """The owner of one model's engines while the model is loaded."""

    def __init__(self, model: ServedModel, on_crash: Callable[[BaseException], None]) -> None:
        """`on_crash` is called with an error of the keeper itself, which can restart engines no more."""
        self._model = model
        self._on_crash = on_crash
        self._keeping: dict[Replica, asyncio.Task[None]] = {}
        self._first_starts = asyncio.Lock()
        self._rolling: asyncio.Task[None] | None = None
        self._drain_seconds = 0.0

    async def start(self) -> None:
        """Starts the first engine and watches all; raises what `AsyncEngine.start` raises."""
        await self._model.engine.start()
        self.watch()

    def watch(self) -> None:
        """Watches the engines, of which the first has been started, and starts the others.

        These load one at a time, so that each sees the memory that those before it have left.
        """
        self._mark_ready()
        for replica in self._model.engine.replicas:
            if replica.engine.ready:
                _log_disk_cache(replica)
            self._keep(replica)

    def join(self, process: EngineProcess, config: EngineConfig, drain_seconds: float) -> None:
        """Adds an engine of another machine, or gives it to the one that awaits it. It is started when the model is loaded.

        When its machine ends it, its requests get `drain_seconds` to end, as those of `restart` do.
        """
        self._drain_seconds = drain_seconds
        if process.joined is not None and any(one.engine.process.offer(process.joined) for one in self._model.engine.replicas):
            return
        replica = self._model.engine.add(process, config)
        if self._keeping:
            self._keep(replica)

    def unwatch(self) -> None:
        """Restarts engines no more."""
        for task in self._tasks():
            task.cancel()

    async def stop(self) -> None:
        """Closes the engines. May be called repeatedly."""
        await cancel(self._tasks())
        self._keeping.clear()
        await self._model.engine.close()
        for replica in [one for one in self._model.engine.replicas if one.joined]:
            self._model.engine.remove(replica)

    def restart(self, seconds: float) -> None:
        """Begins to restart the engines one after the other, unless that is going on. Stops at one that does not become ready.

        The requests of each engine have `seconds` to end. The rest go on in another engine; where they cannot, they may all end here.
        """
        if self._keeping and (self._rolling is None or self._rolling.done()):
            self._rolling = self._start_task(self._restart_all(seconds))

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._keeping.values(), *([] if self._rolling is None else [self._rolling])]

    def _keep(self, replica: Replica) -> None:
        self._keeping[replica] = self._start_task(self._run_joined(replica) if replica.joined else self._restart_loop(replica))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _mark_ready(self) -> None:
        """Marks the model as ready, unless its engines have already died again."""
        if self._model.engine.ready:
            self._model.lifecycle.ready()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)

    async def _restart_loop(self, replica: Replica) -> None:
        """Restarts an engine whenever it dies, forever. One that has not been started is started first."""
        engine, lifecycle = replica.engine, self._model.lifecycle
        failures = 0
        if not engine.ready:
            async with self._first_starts:
                failures += not await self._start(replica)
        while True:
            since = time.monotonic()
            await self._run(replica)
            if time.monotonic() - since > STABLE_SECONDS:
                failures = 0
            delay = restart_delay(failures)
            failures += 1
            logger.error("%s died: restarting it %s", self._name(replica), f"in {delay} s" if delay else "now")
            lifecycle.start_scheduled(delay)
            await engine.close()
            await asyncio.sleep(delay)
            await self._start(replica)

    async def _run_joined(self, replica: Replica) -> None:
        """Runs an engine of another machine until it ends, and forgets it then: the other machine restarts it, and it joins again."""
        if await self._start(replica):
            await self._run(replica)
        await self._forget(replica)

    async def _run(self, replica: Replica) -> None:
        """Waits for an engine's end. If its machine wants to end it, returns after its last request."""
        ended = asyncio.create_task(replica.engine.ended())
        leaving = asyncio.create_task(replica.engine.process.leaving.wait())
        try:
            await asyncio.wait((ended, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            leaving.cancel()
        if ended.done():
            return ended.result()
        if replica.engine.ready:
            logger.info("%s leaves, and runs %d sequences", self._name(replica), replica.engine.open_sequences)
            await self._drain(replica, self._drain_seconds)

    async def _drain(self, replica: Replica, seconds: float) -> None:
        """Lets an engine's requests end. Those that have not ended after `seconds` go on in another engine, or end too if none may."""
        replica.draining = True
        self._model.lifecycle.engine_ended(serving=self._model.engine.ready)
        resumable = self._model.resumes(replica.engine.info.fingerprint)
        await replica.drain(seconds if resumable else math.inf)
        replica.restarts += 1

    async def _forget(self, replica: Replica) -> None:
        await replica.engine.close()
        logger.warning("%s has left", self._name(replica))
        self._model.engine.remove(replica)
        del self._keeping[replica]

    async def _start(self, replica: Replica) -> bool:
        """Starts an engine. Logs whether that succeeded, and returns it."""
        lifecycle = self._model.lifecycle
        try:
            await replica.start()
        except Exception as error:
            if not (self._model.engine.ready or replica.joined):
                lifecycle.start_failed()
            logger.error("%s could not be started: %s: %s", self._name(replica), type(error).__name__, error)
            return False
        logger.info("%s is ready, %d requests waited for it", self._name(replica), lifecycle.held_requests)
        _log_disk_cache(replica)
        self._mark_ready()
        return True

    async def _restart_all(self, seconds: float) -> None:
        for replica in list(self._model.engine.replicas):
            if not replica.engine.ready:
                continue  # it is being restarted
            if not await self._restart(replica, seconds):
                logger.error("the other engines of %s are not restarted", self._model.name)
                return

    async def _restart(self, replica: Replica, seconds: float) -> bool:
        """Restarts a running engine; returns whether it is ready again. One of another machine ends, and joins again by itself."""
        logger.info("restarting %s, which runs %d sequences", self._name(replica), replica.engine.open_sequences)
        self._keeping[replica].cancel()
        await self._drain(replica, seconds)
        if replica.joined:
            await self._forget(replica)
            return True
        await replica.engine.close()
        self._model.lifecycle.start_scheduled()
        started = await self._start(replica)
        self._keep(replica)
        return started

    def _name(self, replica: Replica) -> str:
        if replica.joined:
            return f"engine {replica.number} of {self._model.name}, at {replica.machine},"
        of = f"engine {replica.number}" if len(self._model.engine.replicas) > 1 else "the engine"
        return f"{of} of {self._model.name}"


def restart_delay(failures: int) -> int:
    """Seconds to wait before the next restart, after `failures` engines in a row that died early: 0, 1, 2, 4 and so on."""
    return min(1 << (failures - 1), MAX_RESTART_DELAY) if failures else 0


def _log_disk_cache(replica: Replica) -> None:
    """Logs what an engine that is ready found in its directory for KV blocks, if it has one."""
    if (contents := replica.engine.info.disk_cache) is not None:
        logger.info("prefix cache on disk: %s", contents)
