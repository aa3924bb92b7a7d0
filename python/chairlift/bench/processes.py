"""The same load from several processes, for servers that are faster than one client process can read."""

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
"""Seconds between the moment when all processes are prepared and the start."""


def drive(
    target: Target, jobs: Sequence[Job], seats: int | None, processes: int, on_end: Callable[[bool], None] | None = None
) -> tuple[list[Record], float]:
    """What `load.drive` gives, from as many processes, which take turns at the jobs; the share is of the busiest.

    Raises InvalidSetting for more processes than seats: each has some of its own.
    """
    if processes == 1:
        return asyncio.run(load.drive(target, jobs, seats, on_end=on_end))
    if seats is not None and seats < processes:
        raise InvalidSetting(f"--processes {processes} is more than --max-concurrency {seats}: give each process a request at least")
    # A forked process would share the parent's threads and sockets.
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    try:
        for index in range(processes):
            ours, theirs = context.Pipe()
            own = None if seats is None else seats // processes + (index < seats % processes)
            context.Process(target=_work, args=(target, jobs[index::processes], own, theirs), daemon=True).start()
            theirs.close()
            pipes.append(ours)
        parts = _gather(pipes, on_end)
    except EOFError:
        raise ChairliftError("a process of the client died; with less memory in use, or fewer --processes, it may live") from None
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
    began = time.perf_counter() + START
    for pipe in pipes:
        pipe.send(began)
    parts, open_ = [], set(pipes)
    with _interrupts_told_to(pipes):
        while open_:
            for pipe in [pipe for pipe in wait(list(open_)) if isinstance(pipe, Connection)]:
                told = pipe.recv()
                if not isinstance(told, bool):
                    parts.append(told)
                    open_.discard(pipe)
                elif on_end is not None:
                    on_end(told)
    return parts


@contextlib.contextmanager
def _interrupts_told_to(pipes: Sequence[Connection]) -> Iterator[None]:
    """Ctrl-C asks the processes for what they have so far; a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():  # signals come to the main thread only
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        for pipe in pipes:
            with contextlib.suppress(OSError):  # it is done
                pipe.send(None)

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(target: Target, jobs: Sequence[Job], seats: int | None, pipe: Connection) -> None:
    """One process's part; a message after the start, or the other side's end, ends it early."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all processes; the first of them passes it on

    async def part() -> tuple[list[Record], float]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def listen() -> None:
            with contextlib.suppress(OSError, EOFError):
                pipe.recv()
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended by itself
                loop.call_soon_threadsafe(task.cancel)

        def start() -> float:
            pipe.send(True)
            began: float = pipe.recv()
            threading.Thread(target=listen, daemon=True).start()
            return began

        return await load.drive(target, jobs, seats, start, pipe.send)

    pipe.send(asyncio.run(part()))
