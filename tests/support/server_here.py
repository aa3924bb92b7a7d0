"""A real HTTP server over engines in the event loop, in a thread; and timelines to show."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import uvicorn

from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.outputs import Timeline
from chairlift.server.app import application, guarded
from chairlift.server.batch.runner import BatchRunner
from chairlift.server.config import ServerConfig
from chairlift.server.http.protocol import HttpProtocol, HttpServer
from chairlift.server.keys import read_keys
from chairlift.server.lifecycle import ModelState
from chairlift.server.load_policy import LoadPolicy
from chairlift.server.model import ServedModel
from chairlift.server.service import Service
from chairlift.server.storage.storage import Storage
from chairlift.server.tiers import ServiceTiers

MODEL = "org/fake-model"


class _PromptServer(HttpServer):
    """The server, which notices within 10 ms that it should exit. uvicorn takes 0.2 s, most of the time of most tests."""

    async def main_loop(self) -> None:
        """Serves until `should_exit`."""
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Gives open requests a second to end."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.01)
        for task in self.server_state.tasks:
            task.cancel()


@contextmanager
def serving(engine: ReplicatedEngine, api_key: str | None = None, **settings: Any) -> Iterator[tuple[str, Service]]:
    """A server on a free loopback port, in a thread, with `settings` of ServerConfig: yields its address and its service."""
    model = ServedModel(MODEL, engine)
    with serving_models([model], api_key, **settings) as (base, service):
        yield base, service


@contextmanager
def serving_models(
    models: Sequence[ServedModel], api_key: str | None = None, *, policy: LoadPolicy | None = None, **settings: Any
) -> Iterator[tuple[str, Service]]:
    """As `serving`, with several models. Those with the state `STARTING` are ready."""
    config = ServerConfig(api_key=api_key, **settings)
    keys = read_keys(config.api_key, config.api_key_file, config.operator_key)
    service = Service(models, policy=policy, tiers=ServiceTiers().granted(keys), exact_history=config.exact_history)
    if config.data_dir is not None:
        service.storage = Storage(config.data_dir, config.max_data_size)
    app = application(service, config.max_body_size)
    server = _PromptServer(
        uvicorn.Config(
            guarded(app, config, keys),
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            port=0,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
        )
    )

    service.metrics_page.pause = 0.0

    async def run() -> None:
        started = [model for model in models if model.lifecycle.state is ModelState.STARTING]
        for model in started:
            if isinstance(model.engine, ReplicatedEngine):
                await asyncio.gather(*(replica.start() for replica in model.engine.replicas))
            service.loader.serve_started(model)
        service.loop_monitor.start()
        batches = None
        if service.storage is not None:
            runner = BatchRunner(app, service, service.storage, config.max_body_size, keys)
            batches = asyncio.create_task(runner.run())
        await server.serve()
        if batches is not None:
            batches.cancel()
            await asyncio.gather(batches, return_exceptions=True)
            service.storage.close()
        service.loop_monitor.stop()
        for model in models:
            if isinstance(model.engine, ReplicatedEngine):
                await asyncio.gather(*(replica.engine.close() for replica in model.engine.replicas))

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http{'s' if config.ssl_certfile else ''}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join(10)


def wait_until(condition, seconds: float = 20.0) -> None:
    """Returns as soon as `condition()` holds; the time is a guard, not a measurement."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def timeline(**changes: object) -> Timeline:
    """The timeline of a request that waited a while, ran and ended."""
    return replace(
        Timeline(
            tag=1,
            finish="length",
            arrived=100.0,
            submitted=100.0,
            started=101.5,
            first_token=101.75,
            ended=102.0,
            prompt_tokens=5,
            cached_tokens=0,
            own_cached_tokens=0,
            lost_hit_tokens=0,
            output_tokens=3,
            computed_tokens=7,
            recomputed_tokens=0,
            draft_tokens=0,
            accepted_draft_tokens=0,
            preemptions=0,
            swaps=0,
            block_seconds=0.5,
            compute_seconds=0.25,
            energy_joules=None,
            tenant="",
            priority=0,
            tier="default",
            limit=None,
            preempted_by=(),
            preempted_for={},
            states={"wait_blocks": 1.5, "prefill": 0.25, "decode": 0.25},
        ),
        **changes,
    )
