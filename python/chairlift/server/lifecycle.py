"""Where a server is between its start and its end, and how long its engine takes to come back."""

from __future__ import annotations

import asyncio
import math
import time
from enum import Enum

from chairlift.server.errors import ApiError, unavailable

FIRST_LOAD = 10.0
"""Seconds that the first start of an engine is expected to take; later ones are expected to take what the last one took."""

SHORTEST_HOLD = 60.0
"""Seconds that a request is held for an engine that is being started again; three times what the last start took, if that is more."""


class State(Enum):
    """What a server does with requests, and why."""

    STARTING = "starting"
    """The first engine is being started: requests are refused."""
    READY = "ready"
    """Requests are served."""
    RESTARTING = "restarting"
    """The engine has ended and another one is being started: requests are held until it is ready."""
    FAILED = "failed"
    """The last attempt to start another one failed, and the next one follows: new requests are refused, those that are held stay."""
    DRAINING = "draining"
    """The server ends: new requests and those that are held are refused, those that run may finish. It stays so."""


class Lifecycle:
    """The state of one server. The code that starts and ends engines moves it on; everybody else asks and waits."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.restarts = 0
        """How many engines have ended by themselves after they had served."""
        self.held = 0
        """Requests that wait for an engine which is being started again."""
        self._start_began = time.monotonic()
        """When the start that is under way began, or the next one will."""
        self._start_took: float | None = None
        """Seconds that the last successful start took."""
        self._changed = asyncio.Event()

    def starting(self, after: float = 0.0) -> None:
        """Called when the start of an engine begins, or will begin `after` so many seconds."""
        self._start_began = time.monotonic() + after

    def ready(self) -> None:
        """Called when the engine takes requests."""
        self._start_took = time.monotonic() - self._start_began
        self._move(State.READY)

    def engine_ended(self) -> None:
        """Called when the engine has ended by itself; may be called again for the same end."""
        if self.state is State.READY:
            self.restarts += 1
            self.starting()
            self._move(State.RESTARTING)

    def start_failed(self) -> None:
        """Called when an engine could not be started again."""
        self._move(State.FAILED)

    def drain(self) -> None:
        """Called when the server is to end."""
        self._move(State.DRAINING)

    @property
    def ready_in(self) -> float:
        """Seconds until the engine should take requests, 0 if it does.

        That is what the last start took, less what has passed of this one. When more has passed it is overdue, and expected to take as
        long again as it is overdue. Of a first start that has run for a while, half is taken to be over.
        """
        if self.has_engine:
            return 0.0
        passed = time.monotonic() - self._start_began
        if self._start_took is None:
            return max(FIRST_LOAD - passed, passed)
        return abs(self._start_took - passed)

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine to ask: one that is ready, or that of a server which ends."""
        return self.state in (State.READY, State.DRAINING)

    def check_admission(self) -> None:
        """Raises ApiError 503 unless new requests are taken, to be served or to be held."""
        if self.state not in (State.READY, State.RESTARTING):
            raise self.refusal()

    def refusal(self, *, taken: bool = False) -> ApiError:
        """What a request is told that is not served in this state; `taken` if it was let in, and so counts as failed."""
        if self.state is State.DRAINING:
            return unavailable("the server is shutting down", "shutting_down", 5, taken=taken)
        after = max(1, math.ceil(self.ready_in))
        if self.state is State.STARTING:
            return unavailable("the model is still loading", "not_ready", after, taken=taken)
        message = "the engine has ended and is being started again; the server's log has the reason"
        return unavailable(message, "engine_dead", after, taken=taken)

    async def hold(self, longest: float | None = None) -> bool:
        """Waits while the engine is started again, `longest` seconds at most, and no longer than requests are held.

        Returns whether there is an engine now.
        """
        if self.has_engine:
            return True
        limit = max(SHORTEST_HOLD, 3 * (self._start_took or 0.0))
        self.held += 1
        try:
            async with asyncio.timeout(limit if longest is None else min(limit, longest)):
                while not self.has_engine:
                    await self._changed.wait()
        except TimeoutError:
            return False
        finally:
            self.held -= 1
        return True

    def _move(self, state: State) -> None:
        if self.state is not State.DRAINING:
            self.state = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
