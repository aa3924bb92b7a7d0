"""A signal ends a server at once while a model loads. The engines' processes run fake engines, one of which loads for ever."""

import asyncio
import os
import signal

import fake_engine
import pytest
from async_engine import GUARD, until

from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.replicated_engine import ReplicatedEngine
from chairlift.server.http.sockets import open_port
from chairlift.server.keys import Keys
from chairlift.server.lifecycle import Lifecycle, ModelState
from chairlift.server.model import ServedModel
from chairlift.server.supervisor import Supervisor
from chairlift.server.tiers import ServiceTiers

GATED = 14
"""The seed of an engine that does not load as long as the gate exists."""


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Makes a server with one engine process and the models `quick` and `slow`, of which one is loaded at the start."""
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("FAKE_ENGINE_GATE", str(gate))
    monkeypatch.setattr("chairlift.engine.engine_process.STOP_SECONDS", 3600.0)
    fake_engine.fake(monkeypatch)

    def server(first):
        process = EngineProcess()
        seeds = {"quick": 0, "slow": GATED}
        states = {name: ModelState.STARTING if name == first else ModelState.UNLOADED for name in seeds}
        models = [
            ServedModel(name, ReplicatedEngine(EngineConfig(seed=seed), [process]), keep_alive=300.0, lifecycle=Lifecycle(states[name]))
            for name, seed in seeds.items()
        ]
        return Supervisor(models, ServerConfig(), Keys(), ServiceTiers(), [process]), models, process

    yield server
    gate.unlink()


async def reaches(model, state):
    await until(lambda: model.lifecycle.state is state)


@pytest.mark.parametrize("before", ["nothing", "a model that is loaded", "a model that was unloaded"])
def test_a_signal_while_a_model_loads_ends_the_server_at_once(make, before, caplog):
    async def main():
        server, (quick, slow), process = make("slow" if before == "nothing" else "quick")
        loader = server._service.loader
        with open_port("127.0.0.1", 0) as listener:
            running = asyncio.create_task(server.run(listener))
            async with asyncio.timeout(GUARD):
                if before != "nothing":
                    await reaches(quick, ModelState.READY)
                    if "unloaded" in before:
                        loader.unload(quick)
                        await until(lambda: not process._running)
                    loader.load(slow)
                await reaches(slow, ModelState.LOADING if before != "nothing" else ModelState.STARTING)
                await until(lambda: slow.engine.alive)
                os.kill(os.getpid(), signal.SIGINT)
                assert await running == 0
        assert process.pid is None

    asyncio.run(main())
    assert "could not be loaded" not in caplog.text
