"""The server's main task: listens while the model loads, serves, restarts a dead engine, drains and shuts down."""

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
from chairlift.server.admin import AdminApp
from chairlift.server.app import PROBES, application, guarded
from chairlift.server.http.protocol import HttpProtocol, HttpServer
from chairlift.server.http.sockets import address
from chairlift.server.keys import Keys
from chairlift.server.lifecycle import Lifecycle
from chairlift.server.observability.logs import log_load, redact_query
from chairlift.server.observability.metrics import Metrics
from chairlift.server.observability.traces import Traces
from chairlift.server.observability.usage_log import UsageLog
from chairlift.server.service import Service
from chairlift.server.tiers import ServiceTiers

if TYPE_CHECKING:
    from chairlift.engine.client import AsyncEngine
    from chairlift.server.storage.storage import Storage

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 2
"""Seconds that connections get at shutdown to send what is buffered."""

KEEP_ALIVE_SECONDS = 75
"""Seconds that an idle connection stays open: longer than the timeouts of clients and proxies, so that they close it first."""

MAX_RESTART_DELAY = 60
"""Maximum seconds between two attempts to restart the engine; the first restart is immediate."""

STABLE_SECONDS = 60
"""An engine that ran this long counts as stable: if it dies, the next restart is immediate again."""


def _is_not_probe(record: logging.LogRecord) -> bool:
    """Keeps probes out of the access log, whose records have the path as their third argument."""
    arguments = record.args
    return not (isinstance(arguments, tuple) and len(arguments) > 2 and str(arguments[2]).split("?")[0] in PROBES)


def _is_not_broken_pipe(record: logging.LogRecord) -> bool:
    """Drops asyncio's warning for each write to a client that has disconnected."""
    return record.msg != "socket.send() raised exception."


class Supervisor:
    """Runs one server from start to shutdown."""

    def __init__(self, engine: AsyncEngine, model: str, config: ServerConfig, keys: Keys, tiers: ServiceTiers) -> None:
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
        usage_log = None if config.usage_log is None else UsageLog(config.usage_log, model)
        storage = None if config.data_dir is None else _open_storage(config.data_dir, config.max_data_size)
        self._service = Service(
            engine,
            model,
            metrics,
            config.tool_call_parser,
            config.reasoning_parser,
            traces,
            usage_log,
            storage,
            config.resume,
            tiers,
            lifecycle=self._lifecycle,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the supervisor logs start and shutdown itself
        logging.getLogger("uvicorn.access").addFilter(_is_not_probe)
        logging.getLogger("uvicorn.access").addFilter(redact_query)
        logging.getLogger("asyncio").addFilter(_is_not_broken_pipe)
        self._app = application(self._service, config.max_body_size)
        self._http = HttpServer(
            uvicorn.Config(
                guarded(self._app, config, keys),
                http=HttpProtocol,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                ws="none",
                lifespan="off",
                log_config=None,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self._stop_requested = asyncio.Event()
        self._force_stop = asyncio.Event()

    def admin(self) -> AdminApp:
        """Returns the application for the admin socket."""
        return AdminApp(self._service, lambda: self._stop("request on the admin socket"))

    async def run(self, starting: asyncio.Task[None], listener: socket.socket) -> int:
        """Serves on `listener` until a signal; `starting` is the task that starts the engine. Returns the exit status.

        Raises the error of a failed first start. An engine that dies later is restarted, as often as needed.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number.name)
        http = asyncio.create_task(self._http.serve(sockets=[listener]))
        status_task = asyncio.create_task(log_load(self._engine.stats))
        engine_task = starting
        batch_task: asyncio.Task[None] | None = None
        broken = False
        try:
            await _wait_first(starting, self._stop_requested.wait())
            if starting.done():
                starting.result()
                self._mark_ready()
                logger.info("listening on %s", address(listener, tls=self._config.ssl_certfile is not None))
                engine_task = asyncio.create_task(self._restart_loop())
                batch_task = self._start_batches()
                await _wait_first(http, engine_task, self._stop_requested.wait())
                self._lifecycle.drain()
                if broken := not self._stop_requested.is_set():
                    ended = engine_task if engine_task.done() else http
                    logger.critical("shutting down: a task of the server ended", exc_info=ended.exception())
                engine_task.cancel()
                if batch_task is not None:
                    batch_task.cancel()  # its requests go on at the next start
                await self._drain()
        finally:
            # The engine closes first: open requests end with an error message before their connections close.
            tasks = [task for task in (engine_task, batch_task) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._service.storage is not None:
                self._service.storage.close()
            await self._engine.close()
            self._http.should_exit = True
            self._http.force_exit = self._force_stop.is_set()
            status_task.cancel()
            await asyncio.gather(http, return_exceptions=True)
            if self._service.traces is not None:
                await self._service.traces.close()
            if self._service.usage_log is not None:
                await self._service.usage_log.close()
        return 1 if self._force_stop.is_set() or broken else 0

    def _start_batches(self) -> asyncio.Task[None] | None:
        """Starts the batches' task, if there is a data directory."""
        if (storage := self._service.storage) is None:
            return None
        from chairlift.server.batch.runner import BatchRunner

        return asyncio.create_task(BatchRunner(self._app, self._service, storage, self._config.max_body_size).run())

    def _stop(self, reason: str) -> None:
        """Begins the shutdown; a second call ends it immediately."""
        logger.info("shutting down%s: %s", " now" if self._stop_requested.is_set() else "", reason)
        if self._stop_requested.is_set():
            self._force_stop.set()
        self._stop_requested.set()

    def _mark_ready(self) -> None:
        """Marks the server as ready, unless the engine has already died again."""
        if self._engine.ready:
            self._lifecycle.ready()

    async def _restart_loop(self) -> None:
        """Restarts the engine whenever it dies, forever."""
        failures = 0
        while True:
            since = time.monotonic()
            await self._engine.ended()
            if time.monotonic() - since > STABLE_SECONDS:
                failures = 0
            delay = restart_delay(failures)
            failures += 1
            logger.error("the engine died: restarting it %s", f"in {delay} s" if delay else "now")
            self._lifecycle.start_scheduled(delay)
            await self._engine.close()
            await asyncio.sleep(delay)
            try:
                await self._engine.start()
            except Exception as error:
                self._lifecycle.start_failed()
                logger.error("the engine could not be started: %s: %s", type(error).__name__, error)
            else:
                logger.info("the engine is ready again, %d requests waited for it", self._lifecycle.held_requests)
                self._mark_ready()

    async def _drain(self) -> None:
        """Waits until all open requests have ended, the shutdown timeout expires, or a second signal arrives."""
        limit = self._config.shutdown_timeout
        if self._service.open:
            logger.info("waiting up to %g s for %d open requests; a second signal cancels them", limit, self._service.open)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await _wait_first(self._force_stop.wait(), self._no_open_requests())
        if self._service.open:
            logger.warning("shutdown timeout reached: cancelling %d requests", self._service.open)

    async def _no_open_requests(self) -> None:
        while self._service.open:
            await asyncio.sleep(0.02)


def _open_storage(directory: str, max_bytes: int) -> Storage:
    from chairlift.server.storage.storage import Storage  # imports sqlite3

    return Storage(directory, max_bytes)


def restart_delay(failures: int) -> int:
    """Seconds to wait before the next restart, after `failures` engines in a row that died early: 0, 1, 2, 4 and so on."""
    return min(1 << (failures - 1), MAX_RESTART_DELAY) if failures else 0


async def _wait_first(*awaitables: Awaitable[object]) -> None:
    """Waits until one of them is done, then cancels those that are not tasks of the caller."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for awaitable, task in zip(awaitables, tasks, strict=True):
            if awaitable is not task:
                task.cancel()
