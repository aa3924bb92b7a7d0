"""The longest callback of the event loop is known by name, and how late its timers run."""

import asyncio
import time

import pytest

from chairlift.server.observability import loop_monitor
from chairlift.server.observability.loop_monitor import LoopMonitor

LABELS = {"model_name": "m", "engine": "0"}


def work(seconds):
    """Takes CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def measured(*callbacks):
    """Runs coroutines one after the other in a measured loop, and returns the monitor."""
    monitor = LoopMonitor(LABELS)

    async def main():
        monitor.start()
        try:
            for callback in callbacks:
                await asyncio.create_task(callback)
        finally:
            monitor.stop()

    asyncio.run(main())
    return monitor


async def busy(seconds, name=None):
    if name is not None:
        asyncio.current_task().set_name(name)
    await asyncio.sleep(0)
    work(seconds)


def test_the_longest_callback_is_known_by_its_task():
    seconds, name = measured(busy(0.02), busy(0.05, "/v1/completions"), busy(0.03)).longest
    assert name == "/v1/completions"
    assert 0.05 <= seconds < 0.1
    assert measured(busy(0.02)).longest[1] == "busy"


def test_a_function_is_known_by_its_name():
    async def soon():
        asyncio.get_running_loop().call_soon(work, 0.02)
        await asyncio.sleep(0)

    assert measured(soon()).longest[1] == "work"


def test_waiting_takes_no_cpu_time():
    async def waits():
        time.sleep(0.05)

    assert measured(waits()).longest[0] < 0.02


def test_a_callback_is_forgotten_after_two_windows(monkeypatch):
    monitor = measured(busy(0.02))
    now = time.perf_counter()
    for later, kept in ((1, True), (61, True), (130, False)):
        monkeypatch.setattr(loop_monitor.time, "perf_counter", lambda later=later: now + later)
        assert (monitor.longest[0] > 0) == kept


def test_timers_that_run_late_are_counted():
    async def late():
        asyncio.get_running_loop().call_later(0.001, int)
        work(0.06)
        await asyncio.sleep(0.001)

    [_, lag] = measured(late()).collect()
    counts = {sample.labels["le"]: sample.value for sample in lag.samples if sample.name.endswith("_bucket")}
    assert counts["0.05"] < counts["+Inf"]


def test_the_interpreter_s_own_function_is_back_at_the_end(monkeypatch):
    before, now = vars(asyncio.Handle)["_run"], time.perf_counter()
    monkeypatch.setattr(loop_monitor.time, "perf_counter", lambda: now)  # on a busy machine any callback may take 5 ms of wall time
    assert measured(busy(0)).longest == (0.0, "")
    assert vars(asyncio.Handle)["_run"] is before


def test_errors_of_callbacks_are_handled_as_ever():
    async def fails():
        raise ValueError("expected")

    with pytest.raises(ValueError, match="expected"):
        measured(fails())
