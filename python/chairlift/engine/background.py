"""Tasks that run beside other work, until they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` for the duration of the block, then cancels it and waits for its end. Its errors are dropped."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel([task])


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits for their ends. Their errors are dropped."""
    every = list(tasks)
    for task in every:
        task.cancel()
    await asyncio.gather(*every, return_exceptions=True)
