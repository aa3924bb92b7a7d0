"""Open-loop load: sends each request at its due time and collects the records."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Sequence

from chairlift.bench.client import Target, send_request
from chairlift.bench.record import Record
from chairlift.bench.workload import Job
from chairlift.errors import ChairliftError

HEAD_START = 0.05
"""Seconds between the last preparation and the start of the run."""


async def drive(
    target: Target,
    jobs: Sequence[Job],
    max_concurrency: int | None = None,
    start: Callable[[], float] | None = None,
    on_end: Callable[[bool], None] | None = None,
) -> tuple[list[Record], float]:
    """Sends all jobs. Returns their records, and the share of a core that the client used.

    Jobs are sent at their due times, at most `max_concurrency` at a time. A job without a due time is due as soon as the limit allows.
    `start` is called once all requests are prepared and returns the start time by `time.perf_counter`, which all processes share.
    `on_end` is called at each end, with whether the request succeeded. Cancelling this (Ctrl-C) ends the load and returns the records of
    the requests that have ended.
    """
    allow_sockets()
    http = target.http()
    requests = [target.request(http, job) for job in jobs]
    # A garbage collection that examines what there is now would look like a pause of the server.
    gc.freeze()
    started = time.perf_counter() + HEAD_START if start is None else start()
    limit = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    records: list[Record] = []
    running: set[asyncio.Task[None]] = set()

    async def send(job: Job, request: bytes, record: Record) -> None:
        if limit and job.due is not None:
            await limit.acquire()
            record.admitted = time.perf_counter() - started
        try:
            await send_request(http, target, request, record, started)
        finally:
            if limit:
                limit.release()
        if on_end is not None:
            on_end(record.ok)

    cpu = time.process_time()
    try:
        await asyncio.sleep(started - time.perf_counter())
        for job, request in zip(jobs, requests, strict=True):
            if job.due is not None:
                await asyncio.sleep(max(0.0, started + job.due - time.perf_counter()))
            elif limit:
                await limit.acquire()
            due = time.perf_counter() - started if job.due is None else job.due
            records.append(Record(due, due, requested_tokens=job.output_tokens, prompt_tokens=job.prompt_tokens))
            task = asyncio.create_task(send(job, request, records[-1]))
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
    return records, (time.process_time() - cpu) / max(time.perf_counter() - started, HEAD_START)


async def warm_up(target: Target, jobs: Sequence[Job]) -> None:
    """Runs jobs one after the other, without records. Raises ChairliftError with the server's message if one fails."""
    for job in jobs:
        http = target.http()
        record = Record(0.0)
        await send_request(http, target, target.request(http, job), record, time.perf_counter())
        http.close()
        if not record.ok:
            raise ChairliftError(f"the first request to {target.url}{target.endpoint} failed: {record.failure}: {record.detail}")


def allow_sockets() -> None:
    """Raises the limit of open sockets as far as the system allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
