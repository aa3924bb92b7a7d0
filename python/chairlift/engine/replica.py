"""One of the engines of a model that several of them serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.engine.client import AsyncEngine


class Replica:
    """An engine, its number among the model's engines, and whether it takes new requests.

    `check` is called after each start and may raise an error, which ends the engine.
    """

    def __init__(
        self, number: int, engine: AsyncEngine, check: Callable[[Replica], None] = lambda replica: None, machine: str | None = None
    ) -> None:
        """`machine` is the address of the machine from which the engine has joined; None for this one."""
        self.machine = machine
        self.number = number
        self.engine = engine
        self.restarts = 0
        """Times that an engine of this number died after it had been ready, or was restarted."""
        self.draining = False
        """Whether it gets no new requests because it will be restarted."""
        self.left_out = False
        """Whether it gets none because the server behind it is down or drained: see `chairlift.gate`."""
        self._check = check

    @property
    def joined(self) -> bool:
        """Whether the engine is on another machine, which restarts it."""
        return self.machine is not None

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        return self.engine.ready and not self.draining and not self.left_out

    @property
    def state(self) -> str:
        """`ready`, `draining`, `stuck` or `down`, for operators."""
        if not self.engine.ready:
            return "down"
        return "stuck" if self.engine.stuck else "draining" if self.draining else "ready"

    async def start(self, since: float | None = None) -> None:
        """Starts the engine: see `AsyncEngine.start`."""
        await self.engine.start(since)
        try:
            self._check(self)
        except BaseException:
            await self.engine.close()
            raise
        self.draining = False

    async def drain(self, seconds: float) -> None:
        """Lets the engine's requests end. Those that have not ended after `seconds` go on in another engine; infinite: waits for all."""
        self.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.engine.ready and self.engine.open_sequences and loop.time() < deadline:
            await asyncio.sleep(DRAIN_INTERVAL)
        self.engine.move_requests()


DRAIN_INTERVAL = 0.05
"""Seconds between two looks at whether a draining engine has requests."""
