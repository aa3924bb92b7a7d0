"""When the server makes full garbage collections."""

import asyncio
import gc
import weakref
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from chairlift.engine.background import cancel, in_background
from chairlift.server import garbage


class Cycle:
    def __init__(self):
        self.me = self


@contextmanager
def full_collections():
    """A list with an entry for each."""
    found = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            found.append(1)

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(garbage, "CHECK_SECONDS", 0)
    gc.freeze()
    yield
    gc.unfreeze()


def many():
    """So many objects that Python would collect fully."""
    return [[] for _ in range(300_000)]


async def turns(number=50):
    for _ in range(number):
        await asyncio.sleep(0.001)


def test_no_full_collection_while_requests_are_open(quick):
    async def main():
        idle = False
        thresholds = gc.get_threshold()
        with full_collections() as made:
            async with in_background(garbage.collect_when_idle(lambda: idle)):
                await turns(2)
                cycle = weakref.ref(Cycle())
                kept = many()
                await turns()
                assert made == []
                idle = True
                await turns()
                assert made == [1]  # once, because nothing came after it
                assert cycle() is None
                assert kept
        assert gc.get_threshold() == thresholds

    asyncio.run(main())


def test_a_server_that_was_idle_makes_none_at_its_first_requests(quick, monkeypatch):
    async def main():
        idle, now = True, 0.0
        monkeypatch.setattr(garbage, "time", SimpleNamespace(monotonic=lambda: now))
        with full_collections() as made:
            async with in_background(garbage.collect_when_idle(lambda: idle)):
                await turns(2)
                now = 100.0  # idle for longer than a server may be busy, with nothing to collect
                await turns()
                idle, kept = False, many()
                await turns()
                assert made == []
                now += garbage.BUSY_SECONDS
                await turns()
                assert made
                assert kept

    asyncio.run(main())


def test_a_server_that_is_always_busy_collects_too(quick, monkeypatch):
    async def main():
        with full_collections() as made:
            async with in_background(garbage.collect_when_idle(lambda: False)):
                await turns(2)
                kept = many()
                await turns()
                assert made == []
                monkeypatch.setattr(garbage, "BUSY_SECONDS", 0)
                await turns()
                assert made
                assert kept

    asyncio.run(main())


def test_a_task_in_which_a_timeout_has_just_expired_is_cancelled():
    went_on = []

    async def run():
        limit = asyncio.timeout(None)

        async def work():
            with suppress(TimeoutError):
                async with limit:
                    await asyncio.Event().wait()
            went_on.append(True)

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        limit.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(0)
        await cancel([task])

    asyncio.run(run())
    assert went_on == []
