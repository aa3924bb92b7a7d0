"""What every route shares: the engine, its name, its metrics, and whether new requests are taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from chairlift.errors import EngineDead
from chairlift.server.errors import ApiError, brief, unavailable
from chairlift.server.metrics import Metrics

if TYPE_CHECKING:
    from chairlift.engine.client import AsyncEngine


@dataclass(slots=True)
class Service:
    """One engine being served under one model name."""

    engine: AsyncEngine
    model: str
    metrics: Metrics
    draining: bool = False
    """Set at shutdown: what is running may finish, nothing new is taken."""
    created: int = field(default_factory=lambda: int(time.time()))
    open: int = 0
    """Requests being answered."""

    def admit(self) -> None:
        """Raises ApiError 503 unless new requests are taken."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down", 5)
        if not self.engine.alive:
            raise EngineDead
        if not self.engine.ready:
            raise unavailable("the model is still loading", "not_ready", 2)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served; None means the one that is."""
        if name not in (None, self.model):
            message = f"the model {brief(name)} does not exist; this server has {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def render(self, conversation: list[dict[str, object]]) -> list[int]:
        """A conversation's token ids, ending where the assistant speaks, found off the event loop; raises InvalidRequest."""
        return await asyncio.to_thread(self.engine.tokenizer.chat, conversation)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts a request as open while it lasts."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    service: Service = request.app.state.service
    return service
