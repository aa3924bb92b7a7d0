"""Tenants' service between engine processes: each process is charged once for what the others served."""

import asyncio

import pytest

from chairlift.engine import service_exchange
from chairlift.engine.service_exchange import ServiceExchange, exchanging
from chairlift.errors import EngineDead


class Process:
    """A process whose tenants were `served`; `charged` has what it was told."""

    def __init__(self):
        self.served, self.charged, self.dead = {}, [], False

    async def share_service(self, external):
        if self.dead:
            raise EngineDead("killed")
        self.charged.append(dict(external))
        served, self.served = self.served, {}
        return served


def test_service_is_charged_once_in_each_other_process():
    async def main():
        a, b, c = processes = [Process() for _ in range(3)]
        exchange = ServiceExchange()
        exchange.use(processes)
        a.served, b.served = {"x": 100, "y": 1}, {"x": 20}
        for _ in range(3):
            for process in processes:
                await exchange.ask(process)
        assert a.charged == [{}, {"x": 20}, {}]
        assert b.charged == [{"x": 100, "y": 1}, {}, {}]
        assert c.charged == [{"x": 120, "y": 1}, {}, {}]

    asyncio.run(main())


def test_a_process_that_ended_is_charged_for_nothing_from_before():
    async def main():
        a, b = processes = [Process(), Process()]
        exchange = ServiceExchange()
        exchange.use(processes)
        a.served = {"x": 100}
        await exchange.ask(a)
        b.dead = True
        await exchange.ask(b)
        b.dead, a.served = False, {"x": 3}
        await exchange.ask(b)
        await exchange.ask(a)
        await exchange.ask(b)
        assert b.charged == [{}, {"x": 3}]
        assert a.charged == [{}, {}]

    asyncio.run(main())


def test_a_process_that_joins_is_told_what_came_after_it_and_one_that_left_is_forgotten():
    async def main():
        a, b, c = (Process() for _ in range(3))
        exchange = ServiceExchange()
        exchange.use([a, b])
        a.served = {"x": 1}
        await exchange.ask(a)
        exchange.use([a, c])
        a.served, c.served = {"x": 10}, {"y": 5}
        for process in (a, c, a):
            await exchange.ask(process)
        assert (a.charged, b.charged, c.charged) == ([{}, {}, {"y": 5}], [], [{"x": 10}])

    asyncio.run(main())


@pytest.mark.parametrize("count", [1, 2])
def test_processes_are_asked_for_as_long_as_the_server_runs(monkeypatch, count):
    monkeypatch.setattr(service_exchange, "INTERVAL", 0)

    async def main():
        asked = asyncio.Event()

        class Hanging(Process):
            async def share_service(self, external):
                await asyncio.Event().wait()

        class Asked(Process):
            async def share_service(self, external):
                asked.set()
                return {}

        processes = [Asked(), Hanging()][:count]
        async with exchanging(lambda: processes):
            if count == 2:
                await asked.wait()  # though the other hangs
            for _ in range(5):
                await asyncio.sleep(0)
        assert asked.is_set() == (count == 2)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
