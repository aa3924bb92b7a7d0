"""What every route shares: the engine, its name, its metrics, what requests are called, and whether new ones are taken."""

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
    from chairlift.outputs import Ledger

REMEMBERED = 10_000
"""How many requests are known by name after they ended; the engine keeps what became of as many."""


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
    _named: dict[str, tuple[str, int]] = field(default_factory=dict)

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

    def remember(self, request_id: str, answer_id: str, prompts: int) -> None:
        """Lets `explain` find a request by the id of its answer and by the one that came in its header."""
        for name in (request_id, answer_id):
            self._named.pop(name, None)  # so that it is among the newest
            self._named[name] = answer_id, prompts
        while len(self._named) > 2 * REMEMBERED:
            del self._named[next(iter(self._named))]

    async def explain(self, name: str) -> tuple[str, list[Ledger]]:
        """The id of a request's answer, and what became of its sequences; none of them if it is not known, or not any more."""
        answer_id, prompts = self._named.get(name, (name, 0))
        return answer_id, [ledger for one in engine_ids(answer_id, prompts) for ledger in await self.engine.explain(one)]

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts a request as open while it lasts."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


def engine_ids(answer_id: str, prompts: int) -> list[str]:
    """What the engine calls each prompt of the request with this answer."""
    return [answer_id] if prompts == 1 else [f"{answer_id}-{i}" for i in range(prompts)]


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    service: Service = request.app.state.service
    return service
