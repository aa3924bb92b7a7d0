"""The server's main task: listens while the models load, serves, drains and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.routing import BaseRoute, Route

from chairlift.checkpoint.weight_files import info_before_load, weight_bytes
from chairlift.child_process import STOPS
from chairlift.config import EngineConfig
from chairlift.engine.background import cancel
from chairlift.engine.engine_process import EngineProcess
from chairlift.server.admin import AdminApp
from chairlift.server.app import PROBES, application, guarded
from chairlift.server.config import ServerConfig
from chairlift.server.garbage import collect_when_idle
from chairlift.server.http.connections import AcceptFailures, connection_limit
from chairlift.server.http.protocol import HttpProtocol, HttpServer
from chairlift.server.http.sockets import address
from chairlift.server.keys import Keys
from chairlift.server.lifecycle import Lifecycle, ModelState
from chairlift.server.load_policy import LoadPolicy
from chairlift.server.model import ServedModel
from chairlift.server.observability.logs import log_load, redact_query
from chairlift.server.observability.traces import Traces
from chairlift.server.observability.usage_log import UsageLog
from chairlift.server.service import Service
from chairlift.server.tiers import ServiceTiers
from chairlift.server.tokenizing import Tokenizing

if TYPE_CHECKING:
    from chairlift.engine.joined_process import JoinedProcess
    from chairlift.engine.replicated_engine import ReplicatedEngine
    from chairlift.server.model_specs import ModelSpec
    from chairlift.server.storage.storage import Storage

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 2
"""Seconds that connections get at shutdown to send what is buffered, and the database to write it."""

KEEP_ALIVE_SECONDS = 120
"""Seconds that an idle connection stays open: longer than the timeouts of clients and proxies (Go's is 90), so that they close it first."""

SWITCH_SECONDS = 0.0005
"""How long a thread that runs Python code keeps the interpreter while the event loop waits for it. The loop gives it away with each write
to a connection, so with Python's 5 ms the tokens of eight streams may come 40 ms late while another thread computes."""


def _is_not_probe(record: logging.LogRecord) -> bool:
    """Keeps probes out of the access log, whose records have the path as their third argument."""
    arguments = record.args
    return not (isinstance(arguments, tuple) and len(arguments) > 2 and str(arguments[2]).split("?")[0] in PROBES)


def _is_not_broken_pipe(record: logging.LogRecord) -> bool:
    """Drops asyncio's warning for each write to a client that has disconnected."""
    return record.msg != "socket.send() raised exception."


class Supervisor:
    """Runs one server from start to shutdown."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: ServerConfig,
        keys: Keys,
        tiers: ServiceTiers,
        processes: Sequence[EngineProcess] = (),
        routes: Sequence[BaseRoute] | None = None,
        shadow_command: Sequence[str] = (),
    ) -> None:
        """`processes` are those of the models' engines, which end with the server. `routes` replace those of `app.routes`.

        `shadow_command` is run beside the server, for `observability.shadow`.
        """
        self._config, self._keys, self._processes = config, keys, processes
        self._service = Service(
            models,
            tiers,
            policy=LoadPolicy(config.max_loaded_models, config.models_memory),
            storage=None if config.data_dir is None else _open_storage(config.data_dir, config.max_data_size, keys),
            traces=None if config.otlp_traces_endpoint is None else Traces(config.otlp_traces_endpoint),
            usage_log=None if config.usage_log is None else UsageLog(config.usage_log),
            exact_history=config.exact_history,
            shadow_command=shadow_command,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the supervisor logs start and shutdown itself
        logging.getLogger("uvicorn.access").addFilter(_is_not_probe)
        logging.getLogger("uvicorn.access").addFilter(redact_query)
        logging.getLogger("asyncio").addFilter(_is_not_broken_pipe)
        logging.getLogger("asyncio").addFilter(AcceptFailures())
        self._app = application(self._service, config.max_body_size, routes)
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
            ),
            connection_limit(),
        )
        self._stop_requested = asyncio.Event()
        self._force_stop = asyncio.Event()

    def admin(self, more: Sequence[Route] = ()) -> AdminApp:
        """Returns the application for the admin socket, with `more` routes."""
        return AdminApp(self._service, lambda: self._stop("request on the admin socket"), self._config.shutdown_timeout, more)

    def join(self, process: JoinedProcess, config: EngineConfig) -> None:
        """Adds an engine of another machine to those of the only model, with these settings."""
        engine = EngineProcess(joined=process, exclusive=True)
        self._service.loader.keeper(self._service.default).join(engine, config, self._config.shutdown_timeout)

    async def run(self, listener: socket.socket, starting: asyncio.Task[None] | None = None) -> int:
        """Serves on `listener` until a signal. Returns the exit status.

        `starting` is the task that starts the engine of the only model; this raises its error. Several models are loaded here, as far as
        they are `STARTING`. An engine that dies later is restarted, as often as needed.
        """
        loop = asyncio.get_running_loop()
        for number in STOPS:
            if number is not signal.SIGHUP or signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores it
                loop.add_signal_handler(number, self._stop, number.name)
        self._service.loop_monitor.start()
        switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        http = asyncio.create_task(self._http.serve(sockets=[listener]))
        loads = [asyncio.create_task(log_load(model.engine.stats_by_engine, self._label(model))) for model in self._service.models]
        background = [] if starting is None else [starting]
        broken = False
        try:
            if starting is not None:
                await _wait_first(starting, self._stop_requested.wait())
                if starting.done():
                    starting.result()
                    self._service.loader.started(self._service.default)
            if not self._stop_requested.is_set():
                logger.info("listening on %s", address(listener, tls=self._config.ssl_certfile is not None))
                for model in self._service.models:
                    if model.lifecycle.state is ModelState.STARTING:
                        self._service.loader.load(model)
                crashed = asyncio.create_task(self._service.loader.crashed())
                collecting = asyncio.create_task(collect_when_idle(lambda: not self._service.open))
                background = [crashed, collecting, *self._start_batches(), *self._start_shadow()]
                await _wait_first(http, crashed, self._stop_requested.wait())
                self._service.drain()
                if broken := not self._stop_requested.is_set():
                    ended = crashed if crashed.done() else http
                    logger.critical("shutting down: a task of the server ended", exc_info=ended.exception())
                await self._drain(background[1:])
        finally:
            # The engines close first: open requests end with an error message before their connections close.
            await cancel(background)
            if self._service.storage is not None:  # a disk may hang, and what was acknowledged is on it
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.to_thread(self._service.storage.close), FLUSH_SECONDS)
            # An engine that still loads would end only after that, its process ends at once.
            await asyncio.gather(*(process.close() for process in self._processes))
            await self._service.loader.close()
            self._http.should_exit = True
            self._http.force_exit = self._force_stop.is_set()
            for task in loads:
                task.cancel()
            await asyncio.gather(http, return_exceptions=True)
            self._service.loop_monitor.stop()
            sys.setswitchinterval(switch_seconds)
            if self._service.traces is not None:
                await self._service.traces.close()
            self._service.sequences.drop_all()
            if self._service.usage_log is not None:
                await self._service.usage_log.close()
        return 1 if self._force_stop.is_set() or broken else 0

    def _label(self, model: ServedModel) -> str:
        """Returns what begins the model's lines about its load: its name if there are several models."""
        return f"{model.name}: " if len(self._service.models) > 1 else ""

    def _start_batches(self) -> list[asyncio.Task[None]]:
        """Starts the batches' task, if there is a data directory."""
        if (storage := self._service.storage) is None:
            return []
        from chairlift.server.batch.runner import BatchRunner

        return [asyncio.create_task(BatchRunner(self._app, self._service, storage, self._config.max_body_size, self._keys).run())]

    def _start_shadow(self) -> list[asyncio.Task[None]]:
        if (shadow := self._service.shadow) is None:
            return []
        return [asyncio.create_task(shadow.run(self._service.default.lifecycle.until_available()))]

    def _stop(self, reason: str) -> None:
        """Begins the shutdown; a second call ends it immediately, except for SIGHUP."""
        again = self._stop_requested.is_set()
        if again and reason == signal.SIGHUP.name:
            return  # the shell and the kernel both send it when a terminal is closed, and systemd sends it after SIGTERM to end a session
        logger.info("shutting down%s: %s", " now" if again else "", reason)
        if again:
            self._force_stop.set()
        self._stop_requested.set()

    async def _drain(self, beside: Sequence[asyncio.Task[None]]) -> None:
        """Waits until open requests and the tasks `beside` them have ended, the shutdown timeout expires, or a second signal arrives."""
        limit = self._config.shutdown_timeout
        if self._service.open:
            logger.info("waiting up to %g s for %d open requests; a second signal cancels them", limit, self._service.open)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await _wait_first(self._force_stop.wait(), self._end_requests(beside))
        if self._service.open:
            logger.warning("shutdown timeout reached: cancelling %d requests", self._service.open)

    async def _end_requests(self, beside: Sequence[asyncio.Task[None]]) -> None:
        await cancel(beside)  # the batches' requests go on at the next start
        while self._service.open:
            await asyncio.sleep(0.02)


def served_models(specs: Sequence[ModelSpec], engines: Sequence[ReplicatedEngine], config: ServerConfig) -> list[ServedModel]:
    """Returns the models of `specs`, each with its engine. An only model starts with the server; of several, those that are not preloaded
    are loaded on demand.
    """
    tokenizing = Tokenizing()
    return [
        ServedModel(
            spec.name,
            engine,
            aliases=spec.aliases,
            tool_call_parser=spec.tool_call_parser,
            reasoning_parser=spec.reasoning_parser,
            resume=config.resume,
            keep_alive=spec.keep_alive,
            priority=spec.priority,
            num_bytes=weight_bytes(Path(spec.config.model).expanduser()),
            checkpoint=info_before_load(Path(spec.config.model).expanduser()),
            metrics_alias=config.metrics_alias == "vllm",
            tokenizing=tokenizing,
            lifecycle=Lifecycle(ModelState.STARTING if spec.preload or len(specs) == 1 else ModelState.UNLOADED),
        )
        for spec, engine in zip(specs, engines, strict=True)
    ]


def _open_storage(directory: str, max_bytes: int, keys: Keys) -> Storage:
    from chairlift.server.storage.storage import Storage  # imports sqlite3

    return Storage(directory, max_bytes, keys.groups if len(keys.groups) > 1 else ())


async def _wait_first(*awaitables: Awaitable[object]) -> None:
    """Waits until one of them is done, then cancels those that are not tasks of the caller."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for awaitable, task in zip(awaitables, tasks, strict=True):
            if awaitable is not task:
                task.cancel()
