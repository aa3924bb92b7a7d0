"""The time that the server works is counted for the request that causes it."""

import asyncio
import time

from chairlift.server.observability.loop_monitor import LoopMonitor
from chairlift.server.work import CURRENT_WORK, Work, WorkThreads
from chairlift.template_process import JOB_TIME


def busy(seconds):
    """Takes CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def counted(coroutine, *, monitored):
    """Runs a coroutine as the task of a request, and returns the seconds of its work."""
    monitor, work = LoopMonitor({"model_name": "m", "engine": "0"}), Work()

    async def request():
        CURRENT_WORK.set(work)
        await asyncio.sleep(0)
        await coroutine

    if monitored:
        monitor.start()
    await asyncio.create_task(request())
    monitor.stop()
    return work.seconds


async def in_threads():
    loop = asyncio.get_running_loop()
    loop.set_default_executor(WorkThreads())
    one = WorkThreads(1)
    await asyncio.gather(asyncio.to_thread(busy, 0.02), loop.run_in_executor(one, busy, 0.02), asyncio.to_thread(time.sleep, 0.1))
    one.shutdown()


async def in_the_loop():
    busy(0.02)


def render():
    JOB_TIME.seconds += 5.0


async def in_processes():
    threads = WorkThreads(1)
    for _ in range(2):
        await asyncio.get_running_loop().run_in_executor(threads, render)
    threads.shutdown()


def test_callbacks_count_for_their_request():
    assert asyncio.run(counted(in_the_loop(), monitored=True)) >= 0.02
    assert asyncio.run(counted(in_the_loop(), monitored=False)) == 0


def test_threads_count_for_the_request_that_calls_them():
    assert 0.04 <= asyncio.run(counted(in_threads(), monitored=False)) < 0.1


def test_processes_of_templates_count_for_the_request_that_renders():
    assert 10 <= asyncio.run(counted(in_processes(), monitored=False)) < 10.1
