"""Tenants' service at one engine counts at the others: told within a process, and between processes by the parent."""

import asyncio
from pathlib import Path
from queue import SimpleQueue

import pytest
from async_engine import GUARD
from counting_engine import CountingEngine, install_engine

from chairlift import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine import tenant_service
from chairlift.engine.client import AsyncEngine
from chairlift.engine.engine import Engine
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import Add, Load, Ready, ServiceShared, ShareService, Stop
from chairlift.engine.step_loop import StepLoop
from chairlift.engine.tenant_service import TenantService
from chairlift.scheduling import Scheduling


class Scripted:
    """The part of an engine that takes part."""

    def __init__(self):
        self.served, self.charged = {}, []

    def take_service(self):
        served, self.served = self.served, {}
        return served

    def charge_external(self, service):
        if service:
            self.charged.append(dict(service))


def test_each_engine_is_told_of_the_others_once_an_interval():
    engines, service = [Scripted(), Scripted(), Scripted()], TenantService()
    service.share(engines, 1)
    engines[0].served, engines[1].served = {"x": 5, "y": 1}, {"x": 2}
    service.share(engines, tenant_service.SHARE_US)
    assert [engine.charged for engine in engines] == [[], [], []], "before its time"
    service.share(engines, tenant_service.SHARE_US + 1)
    assert [engine.charged for engine in engines] == [[{"x": 2}], [{"x": 5, "y": 1}], [{"x": 7, "y": 1}]]


def test_the_parent_is_told_of_all_engines_since_its_last_question():
    engines, service = [Scripted(), Scripted()], TenantService()
    engines[0].served = {"x": 5}
    assert service.exchange(engines, {}) == {}
    engines[0].served, engines[1].served = {"x": 1}, {"x": 2}
    service.share(engines, 1)
    engines[1].served = {"y": 3}
    assert service.exchange(engines, {"z": 4}) == {"x": 3, "y": 3}
    assert [engine.charged[-1] for engine in engines] == [{"z": 4}] * 2
    assert service.exchange(engines, {}) == {}


def test_the_step_loop_tells_engines_and_answers_the_parent(monkeypatch):
    monkeypatch.setattr(tenant_service, "SHARE_US", 0)
    install_engine(monkeypatch.setattr)
    inbox, sent, engines = SimpleQueue(), [], []

    class Serving(Scripted, CountingEngine):
        def __init__(self, config, on_phase, hash_key):
            Scripted.__init__(self)
            CountingEngine.__init__(self, config, on_phase, hash_key)
            engines.append(self)

        def step(self):
            self.served["x"] = self.served.get("x", 0) + 1
            if all(engine.charged for engine in engines) and len(engines) == 2:
                inbox.put((0, ShareService({"y": 7})))
                inbox.put((0, Stop()))
            return CountingEngine.step(self)

    monkeypatch.setattr("chairlift.engine.step_loop.start_sentinels", list)

    def send(frame, engine=0, timeout=-1):
        sent.append(frame)
        if isinstance(frame, Ready):
            inbox.put((engine, Add(1, EngineRequest.of(1, [5], SamplingParams(max_tokens=100_000, ignore_eos=True)).pack())))

    inbox.put((1, Load({"model": "second"})))
    StepLoop(inbox, send, Serving).run((0, Load({"model": "first"})))
    assert [engine.charged[0] for engine in engines] == [{"x": 1}] * 2
    assert all(engine.charged[-1] == {"y": 7} for engine in engines)
    assert [frame for frame in sent if isinstance(frame, ServiceShared)] == [ServiceShared({})]


def make(model_dir: Path) -> Engine:
    settings = {"scheduling_policy": "fair", "max_num_seqs": 1, "num_kv_blocks": 200}
    return Engine(EngineConfig(model=str(model_dir), load_format="none", **settings))


def add(engine, tag, tenant):
    engine.add(EngineRequest.of(tag, [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True), Scheduling(tenant=tenant)))


def finish(engine):
    """Runs all requests; the tags in the order of their end."""
    order = []
    while engine.has_work:
        order += [timeline["tag"] for timeline in engine.step().ended]
    return order


@pytest.mark.parametrize("told", [False, True])
def test_a_tenant_served_by_another_engine_goes_later_here(model_dir, told):
    first, second, service = make(model_dir), make(model_dir), TenantService()
    for engine in (first, second):
        add(engine, 1, "x")
        add(engine, 2, "y")
        finish(engine)
    service.exchange([first, second], {})
    for tag in range(10, 400):
        add(first, tag, "x")
    for tag in range(10, 16):
        add(second, tag, "xy"[tag % 2])
    finish(first)
    if told:
        service.exchange([first, second], {})
    order = finish(second)
    assert order[-3:] == [10, 12, 14] if told else order != [11, 13, 15, 10, 12, 14]
    first.close()
    second.close()


def test_the_parent_of_a_process_asks_for_its_service(model_dir):
    async def main():
        async with asyncio.timeout(GUARD), EngineProcess() as process:
            assert await process.share_service({"x": 5}) == {}
            settings = {"model": str(model_dir), "load_format": "none", "scheduling_policy": "fair", "num_kv_blocks": 200}
            engines = [AsyncEngine(process=process, **settings) for _ in range(2)]
            for engine in engines:
                await engine.start()
            assert await process.share_service({"x": 5}) == {}
            for engine, tenant in zip(engines, "xy", strict=True):
                async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True), Scheduling(tenant=tenant)):
                    pass
            service = await process.share_service({"x": 5})
            assert set(service) == {"x", "y"}
            assert all(us > 0 for us in service.values())
            assert await process.share_service({}) == {}
        assert await process.share_service({}) == {}

    asyncio.run(main())
