"""An engine in its client's event loop is used as one in a process of its own."""

import asyncio
from dataclasses import replace

import pytest
from async_engine import GUARD

from chairlift.config import EngineConfig
from chairlift.engine.client import AsyncEngine
from chairlift.engine.estimated_engine import HEADROOM, EstimatedEngine
from chairlift.engine.frames import Answering, Estimate
from chairlift.engine.same_process import SameProcess
from chairlift.errors import EngineClosed, EngineDead, InvalidSetting
from chairlift.gate.model_files import write_model_files
from chairlift.sampling import SamplingParams

BLOCKS, PROMPT = 64, [7] * 100
PARAMS = SamplingParams(max_tokens=500, temperature=0.0, seed=0)


class Engine(EstimatedEngine):
    """Fails in a step while it `breaks`."""

    breaks = False

    def step(self):
        if self.breaks and self.has_work:
            raise ZeroDivisionError("a bug in a step")
        return super().step()


@pytest.fixture
def config(tmp_path):
    write_model_files(tmp_path, 1024)
    sizes = {"block_size": 16, "num_kv_blocks": HEADROOM * BLOCKS, "max_num_seqs": 2, "max_num_batched_tokens": 258}
    return EngineConfig(model=str(tmp_path), load_format="none", speculative_config={"method": "off"}, **sizes)


class Reader:
    """Reads a request that never ends by itself."""

    def __init__(self, engine, name):
        self.started = asyncio.Event()
        self._engine, self._name = engine, name
        self.task = asyncio.create_task(self._read())

    async def _read(self):
        self.stream = await self._engine.prepare_tokens(PROMPT, PARAMS)
        async for _ in self._engine.run(self.stream, request_id=self._name, on_start=self.started.set):
            pass

    async def end(self):
        self.task.cancel()
        await asyncio.wait([self.task])


def run(config, test, make=Engine):
    async def main():
        async with asyncio.timeout(GUARD), SameProcess(make) as process:
            await test(AsyncEngine(config, process=process))

    asyncio.run(main())


def test_requests_start_as_slots_allow_and_are_explained(config):
    async def test(engine):
        async with engine:
            engine.tell(Estimate(step_us=1000, token_ns=100_000, blocks=BLOCKS, ahead=10_000))
            readers = [Reader(engine, f"request {number}") for number in range(3)]
            await readers[0].started.wait()
            await readers[1].started.wait()
            engine.tell(Answering(readers[0].stream.tags[0]))
            snapshot = await engine.take_snapshot()
            assert sorted(name for _, name in snapshot["names"]) == ["request 0", "request 1", "request 2"]
            assert not readers[2].started.is_set()
            await readers[0].end()
            await readers[2].started.wait()
            (timeline,) = await engine.explain("request 0")
            assert (timeline.finish, timeline.prompt_tokens) == ("abort", len(PROMPT))
            for reader in readers:
                await reader.end()
            assert engine.open_sequences == 0

    run(config, test)


def test_an_engine_whose_step_fails_ends_and_can_be_started_again(config, caplog, monkeypatch):
    async def test(engine):
        ends = []
        engine.on_end = lambda: ends.append(engine.alive)
        await engine.start()
        monkeypatch.setattr(Engine, "breaks", True)
        reader = Reader(engine, "lost")
        with pytest.raises(EngineDead, match="ZeroDivisionError: a bug in a step"):
            await reader.task
        await engine.ended()
        assert (ends, engine.ready) == ([False], False)
        monkeypatch.undo()
        await engine.close()
        await engine.start()
        reader = Reader(engine, "found")
        await reader.started.wait()
        await reader.end()
        await engine.close()

    run(config, test)
    assert "a bug in a step" in caplog.text


def test_an_engine_that_cannot_be_made_does_not_start(config):
    def make(config, on_phase, hash_key):
        raise InvalidSetting("this cannot be")

    async def test(engine):
        with pytest.raises(InvalidSetting, match="this cannot be"):
            await engine.start()
        assert not engine.alive

    run(config, test, make)


def test_open_requests_hear_that_the_process_is_closed(config):
    async def test(engine):
        await engine.start()
        reader = Reader(engine, "open")
        await reader.started.wait()
        await engine.process.close()
        with pytest.raises(EngineClosed):
            await reader.task

    run(config, test)


def test_a_tenants_service_is_told_to_the_other_processes(config):
    async def test(engine):
        assert await engine.process.share_service({"other": 5}) == {}
        async with engine:
            assert await engine.process.share_service({"other": 5}) == {}
            reader = Reader(engine, "served")
            await reader.started.wait()
            await reader.end()
            engine.tell(Estimate(step_us=1000, token_ns=1000, blocks=BLOCKS))
            while not (service := await engine.process.share_service({})):
                await asyncio.sleep(0.001)
            assert list(service) == [reader.stream.scheduling.tenant]

    run(replace(config, scheduling_policy="fair"), test)
