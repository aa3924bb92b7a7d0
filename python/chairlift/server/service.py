"""What every route shares: the engine, its name, its metrics, what requests are called, and whether new ones are taken."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from chairlift.errors import InvalidRequest
from chairlift.server.admission import Admission
from chairlift.server.errors import ApiError, brief
from chairlift.server.lifecycle import Lifecycle
from chairlift.server.observability.metrics import Metrics
from chairlift.server.preparing import Preparing
from chairlift.server.refusals import Refusals

if TYPE_CHECKING:
    from chairlift.engine.client import AsyncEngine
    from chairlift.outputs import Timeline
    from chairlift.server.observability.traces import Traces

REMEMBERED = 10_000
"""How many requests are known by name after they ended; the engine keeps what became of as many."""


@dataclass(slots=True)
class Service:
    """One engine being served under one model name."""

    engine: AsyncEngine
    model: str
    metrics: Metrics
    tool_call_parser: str = "auto"
    """How the model writes tool calls: the name of a syntax, or `auto` for what its chat template says."""
    traces: Traces | None = None
    """Where they go, if anywhere."""
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    """Whether requests are taken, held or refused."""
    created: int = field(default_factory=lambda: int(time.time()))
    open: int = 0
    """Requests being answered."""
    admission: Admission = field(init=False)
    """Who waits."""
    refusals: Refusals = field(default_factory=Refusals)
    """Requests that were turned away."""
    preparing: Preparing = field(default_factory=Preparing)
    """Requests whose prompts are being tokenized."""
    _prompts: dict[str, int] = field(default_factory=dict)
    """How many each request has, by its answer's id."""
    _named: dict[tuple[str, str], str] = field(default_factory=dict)
    """Answers' ids by who may ask and the request's id, which clients choose: a tenant's names are its own, "" knows everybody's."""

    def __post_init__(self) -> None:
        """Nobody waits yet."""
        self.admission = Admission(self.engine.config.max_num_queued_reqs, self.engine.stats, self.lifecycle)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not served; None means the one that is."""
        if name not in (None, self.model):
            message = f"the model {brief(name)} does not exist; this server has {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_length(self, text: str) -> None:
        """Raises InvalidRequest for a text that could not fit if all of its tokens were the longest; others must be tokenized to know."""
        limit = self.engine.facts["max_model_len"]
        if len(text) > limit and (least := math.ceil(len(text) / self.engine.tokenizer.longest_token)) > limit:
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens. However, the prompt has {len(text)} characters, which are "
                f"at least {least} tokens. Please shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )

    async def render(self, conversation: list[dict[str, Any]], **variables: Any) -> list[int]:
        """A conversation's token ids, ending where the assistant speaks, found off the event loop; raises InvalidRequest."""
        return await asyncio.to_thread(self.engine.tokenizer.chat, conversation, **variables)

    def remember(self, tenant: str, request_id: str, answer_id: str, prompts: int) -> None:
        """Lets `explain` find a tenant's request by the id of its answer and by the one that came in its header."""
        self._prompts[answer_id] = prompts
        self.refusals.forget(tenant, request_id)
        if len(self._prompts) > REMEMBERED:
            del self._prompts[next(iter(self._prompts))]
        for reader in {tenant, ""}:
            self._named.pop((reader, request_id), None)  # so that it is among the newest
            self._named[reader, request_id] = answer_id
        while len(self._named) > 2 * REMEMBERED:
            del self._named[next(iter(self._named))]

    @property
    def determinism(self) -> str:
        """Whether an answer depends on what else the engine has to do: "batch-invariant" if not, else "best-effort"."""
        return str(self.engine.facts["determinism"])

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Sampling settings of requests that do not set them."""
        settings: Mapping[str, Any] = self.engine.facts.get("default_sampling", {})
        return settings

    async def explain(self, tenant: str, name: str) -> tuple[str, list[Timeline]]:
        """The id of a request's answer, and what became of its sequences; none of them if it is not known, or not any more.

        `tenant` is who asks: others may have called requests of theirs the same. Raises ApiError 503 while there is no engine.
        """
        if not self.lifecycle.has_engine:
            raise self.lifecycle.refusal()
        answer_id = name if name in self._prompts else self._named.get((tenant, name), name)
        ids = engine_ids(answer_id, self._prompts.get(answer_id, 0))
        return answer_id, [ledger for one in ids for ledger in await self.engine.explain(one)]

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
