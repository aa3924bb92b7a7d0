"""A signal ends a server at once while a model loads. The engines' processes run engines that count, one of which loads for ever."""

import asyncio
import gc
import os
import signal
import sys
import threading

import counting_engine
import httpx
import pytest
from async_engine import GUARD, until

from chairlift.config import EngineConfig
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.server import supervisor
from chairlift.server.config import ServerConfig
from chairlift.server.http.sockets import open_port
from chairlift.server.keys import Keys
from chairlift.server.lifecycle import Lifecycle, ModelState
from chairlift.server.model import ServedModel
from chairlift.server.storage.storage import Storage
from chairlift.server.supervisor import SWITCH_SECONDS, Supervisor
from chairlift.server.tiers import ServiceTiers

GATED = 14
"""The seed of an engine that does not load as long as the gate exists."""


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Makes a server with one engine process and the models `quick` and `slow`, of which one is loaded at the start."""
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("COUNTING_ENGINE_GATE", str(gate))
    monkeypatch.setattr("chairlift.engine.engine_process.STOP_SECONDS", 3600.0)
    counting_engine.install(monkeypatch.setattr)

    def server(first, **settings):
        process = EngineProcess()
        seeds = {"quick": 0, "slow": GATED}
        states = {name: ModelState.STARTING if name == first else ModelState.UNLOADED for name in seeds}
        models = [
            ServedModel(name, ReplicatedEngine(EngineConfig(seed=seed), [process]), keep_alive=300.0, lifecycle=Lifecycle(states[name]))
            for name, seed in seeds.items()
        ]
        return Supervisor(models, ServerConfig(**settings), Keys(), ServiceTiers(), [process]), models, process

    yield server
    gate.unlink()


async def reaches(model, state):
    await until(lambda: model.lifecycle.state is state)


@pytest.mark.parametrize(("first", "limit"), [("slow", None), ("quick", None), ("quick", 1)], ids=["alone", "beside one", "in its place"])
def test_a_signal_while_a_model_loads_ends_the_server_at_once(make, first, limit, caplog):
    thresholds, switch_seconds = gc.get_threshold(), sys.getswitchinterval()

    async def main():
        server, (quick, slow), process = make(first, max_loaded_models=limit)
        with open_port("127.0.0.1", 0) as listener:
            running = asyncio.create_task(server.run(listener))
            async with asyncio.timeout(GUARD):
                if first == "quick":
                    await reaches(quick, ModelState.READY)
                    transport = httpx.ASGITransport(server.admin())
                    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
                        assert (await admin.post("/models/load", json={"model": "slow"})).status_code == 202
                    await reaches(slow, ModelState.LOADING)
                await until(lambda: slow.engine.alive)
                assert gc.get_threshold() != thresholds  # full collections wait until no request is open
                assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
                os.kill(os.getpid(), signal.SIGINT)
                assert await running == 0
        assert process.pid is None

    asyncio.run(main())
    assert (gc.get_threshold(), sys.getswitchinterval()) == (thresholds, switch_seconds)
    assert "could not be loaded" not in caplog.text


@pytest.mark.parametrize(("limit", "signals"), [(0.01, 1), (3600.0, 2)])
def test_what_runs_beside_the_requests_ends_within_the_limit(make, monkeypatch, limit, signals):
    async def stuck(began):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    async def main():
        began = asyncio.Event()
        monkeypatch.setattr(Supervisor, "_start_batches", lambda _: [asyncio.create_task(stuck(began))])
        server, _, _ = make(None, shutdown_timeout=limit)
        with open_port("127.0.0.1", 0) as listener:
            running = asyncio.create_task(server.run(listener))
            async with asyncio.timeout(GUARD):
                await began.wait()
                for number in (signal.SIGINT, signal.SIGTERM)[:signals]:
                    os.kill(os.getpid(), number)
                assert await running == signals - 1

    asyncio.run(main())


def test_a_disk_that_hangs_does_not_keep_the_server(make, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "FLUSH_SECONDS", 0.01)
    hangs = threading.Event()
    close = Storage.close

    def late(storage):
        hangs.wait()
        close(storage)

    async def main():
        monkeypatch.setattr(Storage, "close", late)
        server, _, _ = make(None, data_dir=str(tmp_path / "data"))
        with open_port("127.0.0.1", 0) as listener:
            running = asyncio.create_task(server.run(listener))
            try:
                async with asyncio.timeout(GUARD):
                    await asyncio.sleep(0)
                    os.kill(os.getpid(), signal.SIGINT)
                    assert await running == 0
            finally:
                hangs.set()

    asyncio.run(main())
