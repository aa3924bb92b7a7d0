"""Tasks that run beside other work, until they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakSet


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` for the duration of the block, then cancels it and waits for its end. Its errors are dropped."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel([task])


_asked: WeakSet[asyncio.Future[Any]] = WeakSet()


def ask_to_end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks, each only once: a second time would interrupt its last work."""
    for task in tasks:
        # `cancelling` does not tell: it also counts a timeout within the task, after which the task may go on.
        if task not in _asked:
            _asked.add(task)
            task.cancel()


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Asks tasks to end and waits for their ends. Their errors are dropped."""
    every = list(tasks)
    ask_to_end(every)
    await asyncio.gather(*every, return_exceptions=True)
