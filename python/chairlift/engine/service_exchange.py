"""Exchanges tenants' service between engine processes, so that a tenant has one share of all engines of a server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from chairlift.engine.background import cancel, in_background
from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from chairlift.engine.engine_process import EngineProcess

INTERVAL = 0.25
"""Seconds between two exchanges with a process."""


class ServiceExchange:
    """Charges tenants in each process for their service in the others.

    A process that ends loses these charges, as it loses its tenants' accounts.
    """

    def __init__(self) -> None:
        self._external: dict[EngineProcess, Counter[str]] = {}
        self._asking: dict[EngineProcess, asyncio.Task[None]] = {}

    def use(self, processes: Iterable[EngineProcess]) -> None:
        """Exchanges service between these from now on, and forgets all others."""
        self._external = {process: self._external.get(process, Counter()) for process in processes}

    def ask_all(self) -> None:
        """Begins to ask all processes, if there are several. One that has not answered yet is not asked again, and delays no other."""
        for process in self._external if len(self._external) > 1 else ():
            if process not in self._asking:
                self._asking[process] = task = asyncio.create_task(self.ask(process))
                task.add_done_callback(lambda _, process=process: self._asking.pop(process))  # type: ignore[misc]

    async def close(self) -> None:
        """Asks no more."""
        await cancel(self._asking.values())

    async def ask(self, process: EngineProcess) -> None:
        """Tells a process the service in the others since the last call, and notes its own for them."""
        charged, self._external[process] = self._external[process], Counter()
        try:
            service = await process.share_service(charged)
        except ChairliftError:
            return
        for other, external in self._external.items():
            if other is not process:
                external.update(service)


@asynccontextmanager
async def exchanging(processes: Callable[[], Iterable[EngineProcess]]) -> AsyncIterator[None]:
    """Exchanges tenants' service between the present processes for the duration of the block. With one process there is nothing to do."""
    exchange = ServiceExchange()

    async def repeat() -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            exchange.use(processes())
            exchange.ask_all()

    try:
        async with in_background(repeat()):
            yield
    finally:
        await exchange.close()
