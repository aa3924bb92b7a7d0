"""The state of a served model, and the time until its engine is ready."""

from __future__ import annotations

import asyncio
import time
from enum import Enum

from chairlift.server.errors import ApiError, unavailable

FIRST_START_SECONDS = 10.0
"""Expected duration of the engine's first start; a restart is expected to take as long as the last start."""

MIN_HOLD_SECONDS = 60.0
"""Seconds that a request is held while the engine restarts, or three times the duration of the last start if that is more."""


class ModelState(Enum):
    """What the server does with a model's requests, and why."""

    STARTING = "starting"
    """The engine of the only model starts for the first time: requests are refused."""
    UNLOADED = "unloaded"
    """The model is not loaded: a request loads it and is held until it is ready."""
    LOADING = "loading"
    """The model is being loaded: requests are held until it is ready."""
    LOAD_FAILED = "load_failed"
    """The last load failed: requests are refused for a while, then one of them tries again."""
    READY = "ready"
    """Requests are served."""
    RESTARTING = "restarting"
    """The engine died and another one starts: requests are held until it is ready."""
    FAILED = "failed"
    """The last restart failed and another follows: new requests are refused, held ones stay."""
    DRAINING = "draining"
    """The server shuts down: new and held requests are refused, running ones may finish. This state is final."""


_ACCEPTING = (ModelState.READY, ModelState.RESTARTING, ModelState.UNLOADED, ModelState.LOADING, ModelState.LOAD_FAILED)


class Lifecycle:
    """The state of one model. The owner of its engine changes it; others read it and wait for the engine."""

    def __init__(self, state: ModelState = ModelState.STARTING) -> None:
        self.state = state
        self.restarts = 0
        """Number of engines that died after they had been ready."""
        self.held_requests = 0
        """Requests that wait for an engine to restart."""
        self._start_began = time.monotonic()
        """When the current start began, or the next one will."""
        self.start_seconds: float | None = None
        """Duration of the last successful start in seconds."""
        self._changed = asyncio.Event()

    def start_scheduled(self, delay: float = 0.0) -> None:
        """Called when an engine will start in `delay` seconds."""
        self._start_began = time.monotonic() + delay

    def loading(self) -> None:
        """Called when an unloaded model begins to load."""
        self.start_scheduled()
        self._set_state(ModelState.LOADING)

    def unloaded(self) -> None:
        """Called when the model gives up its memory."""
        self._set_state(ModelState.UNLOADED)

    def load_failed(self) -> None:
        """Called when the model could not be loaded."""
        self._set_state(ModelState.LOAD_FAILED)

    def ready(self) -> None:
        """Called when an engine accepts requests; without effect if another one of the model does so already."""
        if self.state is ModelState.READY:
            return
        self.start_seconds = time.monotonic() - self._start_began
        self._set_state(ModelState.READY)

    def engine_ended(self, *, serving: bool = False) -> None:
        """Called when an engine died; `serving` if another one of the model is ready. Repeated calls for one death are ignored."""
        if self.state is ModelState.READY:
            self.restarts += 1
            if not serving:
                self.start_scheduled()
                self._set_state(ModelState.RESTARTING)

    def start_failed(self) -> None:
        """Called when a restart failed."""
        self._set_state(ModelState.FAILED)

    def drain(self) -> None:
        """Called when the server is about to shut down."""
        self._set_state(ModelState.DRAINING)

    @property
    def seconds_until_ready(self) -> float:
        """Estimated seconds until the engine accepts requests, 0 if it does.

        The estimate is the duration of the last start, minus the time that this one has run if there is one. A start that takes longer is
        expected to need the excess once more. A first start is expected to be half done once it exceeds `FIRST_START_SECONDS`.
        """
        if self.engine_available:
            return 0.0
        if self.state in (ModelState.UNLOADED, ModelState.LOAD_FAILED):
            return FIRST_START_SECONDS if self.start_seconds is None else self.start_seconds
        passed = time.monotonic() - self._start_began
        if self.start_seconds is None:
            return max(FIRST_START_SECONDS - passed, passed)
        return abs(self.start_seconds - passed)

    @property
    def engine_available(self) -> bool:
        """Whether there is an engine to talk to: it is ready, or the server is draining."""
        return self.state in (ModelState.READY, ModelState.DRAINING)

    @property
    def accepts(self) -> bool:
        """Whether new requests are served or held."""
        return self.state in _ACCEPTING

    def check_admission(self) -> None:
        """Raises ApiError 503 unless new requests are served or held."""
        if not self.accepts:
            raise self.refusal()

    def refusal(self, *, admitted: bool = False) -> ApiError:
        """Returns the error for a request that cannot be served in this state.

        `admitted` if it had been accepted, so it counts as failed.
        """
        if self.state is ModelState.DRAINING:
            return unavailable("the server is shutting down", "shutting_down", 5, admitted=admitted)
        if self.state in (ModelState.STARTING, ModelState.LOADING, ModelState.UNLOADED):
            return unavailable("the model is still loading", "not_ready", self.seconds_until_ready, admitted=admitted)
        message = "the engine died and is restarting; the server's log has the reason"
        return unavailable(message, "engine_dead", self.seconds_until_ready, admitted=admitted)

    def suspicion(self, deaths: int) -> ApiError:
        """Returns the error for a request that ran each of the last `deaths` times that the engine died."""
        message = f"the engine died {deaths} times in a row while it ran this request, which may be the cause; it is not tried again"
        return unavailable(message, "engine_dead", self.seconds_until_ready, admitted=True)

    @property
    def hold_seconds(self) -> float:
        """Maximum seconds that a request is held while the engine starts."""
        return max(MIN_HOLD_SECONDS, 3 * (self.start_seconds or 0.0))

    async def until_available(self) -> None:
        """Waits until an engine is available, however long that takes."""
        while not self.engine_available:
            await self._changed.wait()

    async def wait_for_engine(self, timeout: float | None = None) -> bool:
        """Waits while the engine restarts, at most `timeout` seconds and at most as long as requests are held.

        Returns whether an engine is available.
        """
        if self.engine_available:
            return True
        limit = self.hold_seconds
        self.held_requests += 1
        try:
            async with asyncio.timeout(limit if timeout is None else min(limit, timeout)):
                await self.until_available()
        except TimeoutError:
            return False
        finally:
            self.held_requests -= 1
        return True

    def _set_state(self, state: ModelState) -> None:
        if self.state is not ModelState.DRAINING:
            self.state = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
