"""The load from several client processes, for servers that are faster than one client process."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from chairlift.bench import load
from chairlift.bench.client import Target
from chairlift.bench.record import Record
from chairlift.bench.workload import Job
from chairlift.errors import ChairliftError, InvalidSetting

START = 0.2
"""Seconds between the preparation of all processes and the start."""


def drive(
    target: Target, jobs: Sequence[Job], max_concurrency: int | None, processes: int, on_end: Callable[[bool], None] | None = None
) -> tuple[list[Record], float]:
    """Runs `load.drive` in several processes, with the jobs dealt out in turn. The CPU share is that of the busiest process.

    Raises InvalidSetting for more processes than `max_concurrency`, which is divided between them.
    """
    if processes == 1:
        return asyncio.run(load.drive(target, jobs, max_concurrency, on_end=on_end))
    if max_concurrency is not None and max_concurrency < processes:
        raise InvalidSetting(f"--processes {processes} is more than --max-concurrency {max_concurrency}: each process needs at least one")
    # A forked process would inherit threads and sockets.
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    try:
        for index in range(processes):
            ours, theirs = context.Pipe()
            share = None if max_concurrency is None else max_concurrency // processes + (index < max_concurrency % processes)
            context.Process(target=_work, args=(target, jobs[index::processes], share, theirs), daemon=True).start()
            theirs.close()
            pipes.append(ours)
        parts = _gather(pipes, on_end)
    except EOFError:
        raise ChairliftError("a client process died, perhaps for lack of memory: use fewer --processes") from None
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
        for pipe in pipes:
            pipe.close()
    records = sorted((record for part, _ in parts for record in part), key=lambda record: record.due)
    return records, max(share for _, share in parts)


def _gather(pipes: Sequence[Connection], on_end: Callable[[bool], None] | None) -> list[tuple[list[Record], float]]:
    for pipe in pipes:
        pipe.recv()  # prepared
    started = time.perf_counter() + START
    for pipe in pipes:
        pipe.send(started)
    parts, open_ = [], set(pipes)
    with _forward_interrupts(pipes):
        while open_:
            for pipe in [pipe for pipe in wait(list(open_)) if isinstance(pipe, Connection)]:
                message = pipe.recv()
                if not isinstance(message, bool):
                    parts.append(message)
                    open_.discard(pipe)
                elif on_end is not None:
                    on_end(message)
    return parts


@contextlib.contextmanager
def _forward_interrupts(pipes: Sequence[Connection]) -> Iterator[None]:
    """Ctrl-C makes the processes return their records so far; a second one exits at once."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    previous = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, previous)
        for pipe in pipes:
            with contextlib.suppress(OSError):  # the process has ended
                pipe.send(None)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _work(target: Target, jobs: Sequence[Job], max_concurrency: int | None, pipe: Connection) -> None:
    """Runs one process's part of the load. A message after the start, or a closed pipe, ends it early."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals all processes; the parent forwards it

    async def part() -> tuple[list[Record], float]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def listen() -> None:
            with contextlib.suppress(OSError, EOFError):
                pipe.recv()
            with contextlib.suppress(RuntimeError):  # the load has ended and the loop is closed
                loop.call_soon_threadsafe(task.cancel)

        def start() -> float:
            pipe.send(True)
            started: float = pipe.recv()
            threading.Thread(target=listen, daemon=True).start()
            return started

        return await load.drive(target, jobs, max_concurrency, start, pipe.send)

    pipe.send(asyncio.run(part()))
