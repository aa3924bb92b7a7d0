"""The server's life: it listens while the model loads, serves, starts an engine that died again, drains, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import uvicorn

from chairlift.config import ServerConfig
from chairlift.server.admin import Admin
from chairlift.server.app import PROBES, build
from chairlift.server.http.protocol import Http, HttpServer
from chairlift.server.http.sockets import address
from chairlift.server.keys import Keys
from chairlift.server.lifecycle import Lifecycle
from chairlift.server.observability import status_line
from chairlift.server.observability.logs import redact_query
from chairlift.server.observability.metrics import Metrics
from chairlift.server.observability.traces import Traces
from chairlift.server.service import Service

if TYPE_CHECKING:
    from chairlift.engine.client import AsyncEngine

logger = logging.getLogger(__name__)

LAST_WORDS = 2
"""Seconds that answers cut short get to leave the machine."""

KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients and proxies keep theirs, so that it is they who close it."""

LONGEST_PAUSE = 60
"""Seconds between two attempts to start the engine again, at most; the first comes at once."""

SERVED_WELL = 60
"""Seconds after which an engine that dies was a good one: the next is started at once again."""


def _unprobed(record: logging.LogRecord) -> bool:
    """Keeps probes out of the access log, whose records have the path as their third argument."""
    arguments = record.args
    return not (isinstance(arguments, tuple) and len(arguments) > 2 and str(arguments[2]).split("?")[0] in PROBES)


def _unbroken(record: logging.LogRecord) -> bool:
    """Keeps out of the log that clients left in the middle of a stream, which asyncio would tell of a line at a time."""
    return record.msg != "socket.send() raised exception."


class Supervisor:
    """One server from its start to its end."""

    def __init__(self, engine: AsyncEngine, model: str, config: ServerConfig, keys: Keys) -> None:
        self._config = config
        self._engine = engine
        self._lifecycle = Lifecycle()
        engine.on_end = self._lifecycle.engine_ended
        metrics = Metrics(
            model,
            engine.stats,
            lambda: engine.facts,
            restarts=lambda: self._lifecycle.restarts,
            alias=config.metrics_alias == "vllm",
        )
        traces = None if config.otlp_traces_endpoint is None else Traces(config.otlp_traces_endpoint, model)
        self._service = Service(engine, model, metrics, config.tool_call_parser, traces, self._lifecycle)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # what it has to tell of, this class tells
        logging.getLogger("uvicorn.access").addFilter(_unprobed)
        logging.getLogger("uvicorn.access").addFilter(redact_query)
        logging.getLogger("asyncio").addFilter(_unbroken)
        self._http = HttpServer(
            uvicorn.Config(
                build(self._service, config, keys),
                http=Http,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
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

    def admin(self) -> Admin:
        """The application for the operator's own socket."""
        return Admin(self._service, lambda: self._stop("asked to on the admin socket"))

    async def run(self, starting: asyncio.Task[None], listener: socket.socket) -> int:
        """Serves on `listener` until a signal; `starting` is the engine's start. Returns the exit status_line.

        Raises what kept the engine from starting: nobody is served yet, and whoever started the server is there to hear why. When
        the engine ends later it is started again, as often as it takes.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number.name)
        http = asyncio.create_task(self._http.serve(sockets=[listener]))
        reporting = asyncio.create_task(status_line.report(self._engine.stats))
        tending = starting
        broken = False
        try:
            await _first(starting, self._leave.wait())
            if starting.done():
                starting.result()
                self._take_requests()
                logger.info("listening on %s", address(listener, tls=self._config.ssl_certfile is not None))
                tending = asyncio.create_task(self._keep_alive())
                await _first(http, tending, self._leave.wait())
                self._lifecycle.drain()
                if broken := not self._leave.is_set():
                    ended = tending if tending.done() else http
                    logger.critical("shutting down: a task of the server ended", exc_info=ended.exception())
                tending.cancel()
                await self._drain()
        finally:
            # The engine first: what is still open ends with an error that says so, and only then the connections.
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
            await self._engine.close()
            self._http.should_exit = True
            self._http.force_exit = self._now.is_set()
            reporting.cancel()
            await asyncio.gather(http, return_exceptions=True)
            if self._service.traces is not None:
                await self._service.traces.close()
        return 1 if self._now.is_set() or broken else 0

    def _stop(self, reason: str) -> None:
        """Begins the server's end, or ends it now if it had begun."""
        logger.info("shutting down%s: %s", " now" if self._leave.is_set() else "", reason)
        if self._leave.is_set():
            self._now.set()
        self._leave.set()

    def _take_requests(self) -> None:
        """Says that the engine is ready, unless it has ended again since it said so."""
        if self._engine.ready:
            self._lifecycle.ready()

    async def _keep_alive(self) -> None:
        """Starts the engine again whenever it has ended, for ever."""
        failures = 0
        while True:
            since = time.monotonic()
            await self._engine.ended()
            if time.monotonic() - since > SERVED_WELL:
                failures = 0
            pause = pause_after(failures)
            failures += 1
            logger.error("the engine has ended: starting it again %s", f"in {pause} s" if pause else "now")
            self._lifecycle.starting(pause)
            await self._engine.close()
            await asyncio.sleep(pause)
            try:
                await self._engine.start()
            except Exception as error:
                self._lifecycle.start_failed()
                logger.error("the engine could not be started: %s: %s", type(error).__name__, error)
            else:
                logger.info("the engine is ready again: %d requests were held for it", self._lifecycle.held)
                self._take_requests()

    async def _drain(self) -> None:
        """Waits until what is open has ended, or as long as it may, or a second signal."""
        limit = self._config.shutdown_timeout
        if self._service.open:
            logger.info("%d open requests get %g s to finish; a second signal ends them now", self._service.open, limit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await _first(self._now.wait(), self._empty())
        if self._service.open:
            logger.warning("ending %d open requests, which did not finish in time", self._service.open)

    async def _empty(self) -> None:
        while self._service.open:
            await asyncio.sleep(0.02)


def pause_after(failures: int) -> int:
    """Seconds to wait before the engine is started again, after so many that died young: 0, 1, 2, 4 and so on."""
    return min(1 << (failures - 1), LONGEST_PAUSE) if failures else 0


async def _first(*awaitables: Awaitable[object]) -> None:
    """Waits until one of them is done; the others are cancelled, unless they came as tasks."""
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one, task in zip(awaitables, tasks, strict=True):
            if one is not task:
                task.cancel()
