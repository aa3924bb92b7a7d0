"""The server's life: it listens while the model loads, serves, drains, and ends with its engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from chairlift.config import ServerConfig
from chairlift.server import status
from chairlift.server.app import PROBES, build
from chairlift.server.metrics import Metrics
from chairlift.server.service import Service

if TYPE_CHECKING:
    from chairlift.engine.client import AsyncEngine

logger = logging.getLogger(__name__)

LAST_WORDS = 2
"""Seconds that answers cut short get to leave the machine."""

KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients and proxies keep theirs, so that it is they who close it."""


class _Http(uvicorn.Server):
    """uvicorn, but signals are ours: it would refuse connections at once instead of answering 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _unprobed(record: logging.LogRecord) -> bool:
    """Keeps probes out of the access log, whose records have the path as their third argument."""
    arguments = record.args
    return not (isinstance(arguments, tuple) and len(arguments) > 2 and str(arguments[2]).split("?")[0] in PROBES)


class Life:
    """One server from its start to its end."""

    def __init__(self, engine: AsyncEngine, model: str, config: ServerConfig) -> None:
        self._config = config
        self._engine = engine
        self._service = Service(engine, model, Metrics(model, engine.stats))
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # what it has to tell of, this class tells
        logging.getLogger("uvicorn.access").addFilter(_unprobed)
        # h11 bounds headers, which httptools does not.
        self._http = _Http(
            uvicorn.Config(
                build(self._service, config.api_key),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=LAST_WORDS,
            )
        )
        self._leave = asyncio.Event()
        self._now = asyncio.Event()

    async def run(self, starting: asyncio.Task[None], listener: socket.socket) -> int:
        """Serves on `listener` until a signal; `starting` is the engine's start. Returns the exit status.

        Raises what kept the engine from starting. When the engine ends by itself the server ends too, with status 1: whoever
        watches over it can start both again, which no probe would tell them to do.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        http = asyncio.create_task(self._http.serve(sockets=[listener]))
        reporting = asyncio.create_task(status.report(self._engine.stats))
        died = False
        try:
            await _first(starting, self._leave.wait())
            if starting.done():
                starting.result()
                logger.info("listening on %s", _address(listener))
                await _first(http, self._leave.wait(), self._engine.ended())
                if died := not self._engine.alive:
                    logger.error("the engine has ended: ending too")
                else:
                    await self._drain()
        finally:
            # The engine first: what is still open ends with an error that says so, and only then the connections.
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._engine.close()
            self._http.should_exit = True
            self._http.force_exit = self._now.is_set()
            reporting.cancel()
            await http
        return 1 if died or self._now.is_set() else 0

    def _signal(self) -> None:
        if self._leave.is_set():
            self._now.set()
        self._leave.set()

    async def _drain(self) -> None:
        """Takes nothing new, and waits until what is open has ended, or as long as it may, or a second signal."""
        self._service.draining = True
        limit = self._config.shutdown_timeout
        if self._service.open:
            logger.info("shutting down: %d requests have %g s to finish; once more to end now", self._service.open, limit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await _first(self._now.wait(), self._empty())
        if self._service.open:
            logger.warning("ending %d requests that did not finish", self._service.open)

    async def _empty(self) -> None:
        while self._service.open:
            await asyncio.sleep(0.02)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


async def _first(*awaitables: Awaitable[object]) -> None:
    """Waits until one of them is done; the others are cancelled, unless they came as tasks."""
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one, task in zip(awaitables, tasks, strict=True):
            if one is not task:
                task.cancel()
