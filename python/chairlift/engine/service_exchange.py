"""Tenants' service, told between engine processes, so that a tenant has one share of all engines of a server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from chairlift.errors import ChairliftError

INTERVAL = 0.25
"""Seconds between two exchanges with a process."""


class _Process(Protocol):
    """The part of an engine process that is needed here."""

    async def share_service(self, elsewhere: Mapping[str, int]) -> dict[str, int]:
        """See `EngineProcess.share_service`."""


class ServiceExchange:
    """Charges tenants in each process for their service in the others.

    A process that ends loses what it was told, as it loses its tenants' accounts.
    """

    def __init__(self, processes: Sequence[_Process]) -> None:
        self._elsewhere: dict[_Process, Counter[str]] = {process: Counter() for process in processes}

    async def ask(self, process: _Process) -> None:
        """Tells a process the service in the others since the last call, and notes its own for them."""
        told, self._elsewhere[process] = self._elsewhere[process], Counter()
        try:
            service = await process.share_service(told)
        except ChairliftError:
            return
        for other, elsewhere in self._elsewhere.items():
            if other is not process:
                elsewhere.update(service)

    async def repeat(self, process: _Process) -> None:
        """Asks a process again and again. Each has a task of its own, so that one that hangs delays no other."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.ask(process)


@asynccontextmanager
async def exchanging(processes: Sequence[_Process]) -> AsyncIterator[None]:
    """Exchanges tenants' service between the processes for the duration of the block. With one process there is nothing to do."""
    exchange = ServiceExchange(processes)
    tasks = [asyncio.create_task(exchange.repeat(process)) for process in processes] if len(processes) > 1 else []
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
