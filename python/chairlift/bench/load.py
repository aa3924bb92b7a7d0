"""Sends requests when they are due, whatever has come back by then, and gathers their records."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Sequence

from chairlift.bench.client import Target, ask
from chairlift.bench.record import Record
from chairlift.bench.workload import Job
from chairlift.errors import ChairliftError

HEAD_START = 0.05
"""Seconds between the last preparation and the start of the run."""


async def drive(
    target: Target,
    jobs: Sequence[Job],
    seats: int | None = None,
    start: Callable[[], float] | None = None,
    on_end: Callable[[bool], None] | None = None,
) -> tuple[list[Record], float]:
    """The records of all jobs, and the part of a core that sending and reading them took.

    Jobs go out when they are due, at most `seats` at a time; those without a time go when a seat is free, which is when they are due.
    `start` is called when all is prepared and gives the start by `time.perf_counter`, which all processes share; `on_end` hears of each
    end, and whether it was a good one. Cancelling it, as Ctrl-C does, ends the load: the records are of those that have ended.
    """
    _allow_sockets()
    http = target.http()
    requests = [target.request(http, job) for job in jobs]
    # A collection in the middle would look like a pause of the server.
    gc.collect()
    gc.freeze()
    began = time.perf_counter() + HEAD_START if start is None else start()
    seat = None if seats is None else asyncio.Semaphore(seats)
    records: list[Record] = []
    running: set[asyncio.Task[None]] = set()

    async def one(job: Job, request: bytes, record: Record) -> None:
        if seat and job.due is not None:
            await seat.acquire()
            record.seated = time.perf_counter() - began
        try:
            await ask(http, target, request, record, began)
        finally:
            if seat:
                seat.release()
        if on_end is not None:
            on_end(record.ok)

    cpu = time.process_time()
    try:
        await asyncio.sleep(began - time.perf_counter())
        for job, request in zip(jobs, requests, strict=True):
            if job.due is not None:
                await asyncio.sleep(max(0.0, began + job.due - time.perf_counter()))
            elif seat:
                await seat.acquire()
            due = time.perf_counter() - began if job.due is None else job.due
            records.append(Record(due, due, wanted_tokens=job.output_tokens, prompt_tokens=job.prompt_tokens))
            task = asyncio.create_task(one(job, request, records[-1]))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    except asyncio.CancelledError:
        records = [record for record in records if record.end]
    finally:
        for task in running:
            task.cancel()
        http.close()
        gc.unfreeze()
    return records, (time.process_time() - cpu) / max(time.perf_counter() - began, HEAD_START)


async def warm_up(target: Target, jobs: Sequence[Job]) -> None:
    """Runs jobs one after the other, which are in no result; raises ChairliftError with the server's words if one fails."""
    for job in jobs:
        http = target.http()
        record = Record(0.0)
        await ask(http, target, target.request(http, job), record, time.perf_counter())
        http.close()
        if not record.ok:
            raise ChairliftError(f"the first request to {target.url}{target.endpoint} failed: {record.failure}: {record.detail}")


def _allow_sockets() -> None:
    """Lets this process have as many sockets as the system allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
