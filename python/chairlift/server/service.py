"""State that all routes share: the engine, its model's name, metrics, admission and recent requests."""

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
from chairlift.server.registry import RequestRegistry
from chairlift.server.sequences import Sequences
from chairlift.server.tiers import ServiceTiers

if TYPE_CHECKING:
    from chairlift.engine.client import AsyncEngine
    from chairlift.outputs import Timeline
    from chairlift.server.observability.traces import Traces
    from chairlift.server.observability.usage_log import UsageLog
    from chairlift.server.storage.storage import Storage


@dataclass(slots=True)
class Service:
    """One engine, served under one model name."""

    engine: AsyncEngine
    model: str
    metrics: Metrics
    tool_call_parser: str = "auto"
    """Name of a tool-call parser, or `auto` to choose one by the chat template."""
    reasoning_parser: str = "auto"
    """Name of a reasoning format, `auto` to choose one by the chat template, or `none`."""
    traces: Traces | None = None
    """Exports OpenTelemetry traces, if configured."""
    usage_log: UsageLog | None = None
    """Records what each request used, if configured."""
    storage: Storage | None = None
    """Files and batches, with `--data-dir`."""
    resume: str = "exact"
    """Which engines may go on with the answers of one that ended: see `--resume`."""
    tiers: ServiceTiers = field(default_factory=ServiceTiers)
    """The service tiers and who may use them."""
    probation: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one request that runs although it may be the cause of the engine's deaths."""
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    """Whether requests are served, held or refused."""
    created: int = field(default_factory=lambda: int(time.time()))
    open: int = 0
    """Requests being answered."""
    admission: Admission = field(init=False)
    """Counts waiting requests."""
    registry: RequestRegistry = field(default_factory=RequestRegistry)
    """Recent requests, for explanations."""
    sequences: Sequences = field(default_factory=Sequences)
    """Clients' live sequences."""

    def __post_init__(self) -> None:
        """Creates the admission from the engine's configuration."""
        self.admission = Admission(self.engine.config.max_num_queued_reqs, self.engine.stats, self.lifecycle)

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """Sampling parameters for requests that do not set them."""
        settings: Mapping[str, Any] = self.engine.facts.get("default_sampling", {})
        return settings

    @property
    def data(self) -> Storage:
        """The storage; raises ApiError 400 on a server without one."""
        if self.storage is None:
            message = "this server stores no files and runs no batches: start it with --data-dir DIR"
            raise ApiError(400, message, code="unsupported")
        return self.storage

    def adapter(self, name: str | None) -> str | None:
        """Returns `name` if a LoRA adapter has it, else None."""
        return name if name in self.engine.adapters and name != self.model else None

    def check_model(self, name: str | None, *, adapters: bool = True) -> None:
        """Raises ApiError 404 unless `name` is the served model or, with `adapters`, one of its LoRA adapters; None selects the model."""
        if name not in (None, self.model) and not (adapters and self.adapter(name)):
            names = [self.model, *(sorted(self.engine.adapters) if adapters else ())]
            message = f"the model {brief(name)} does not exist; this server has {', '.join(map(repr, names))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_length(self, text: str) -> None:
        """Raises InvalidRequest for a text that exceeds the context even if every token is the longest of the vocabulary."""
        limit = self.engine.facts["max_model_len"]
        if len(text) > limit and (min_tokens := math.ceil(len(text) / self.engine.tokenizer.longest_token)) > limit:
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens. However, the prompt has {len(text)} characters, which are "
                f"at least {min_tokens} tokens. Please shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )

    async def render(self, conversation: list[dict[str, Any]], **variables: Any) -> list[int]:
        """Applies the chat template in a thread and returns the prompt's token ids; raises InvalidRequest."""
        return await asyncio.to_thread(self.engine.tokenizer.chat, conversation, **variables)

    async def explain(self, reader: str, name: str) -> tuple[str, list[Timeline]]:
        """Returns the answer's id and the timelines of a request's sequences, none if the request is unknown.

        `reader` is the tenant who asks, "" for the operator. Raises ApiError 503 while there is no engine.
        """
        if not self.lifecycle.engine_available:
            raise self.lifecycle.refusal()
        answer_id, ids = self.registry.resolve(reader, name)
        return answer_id, [timeline for engine_id in ids for timeline in await self.engine.explain(engine_id)]

    @contextmanager
    def track_open(self) -> Iterator[None]:
        """Counts a request as open for the duration of the block."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


def tasks(facts: Mapping[str, Any]) -> list[str]:
    """Returns what a model does, by its engine's facts: `generate`, `embed`, or both."""
    return ["generate"] * facts["generates"] + ["embed"] * (facts["max_text_len"] is not None)


def service_of(request: Request) -> Service:
    """Returns the service that handles `request`."""
    service: Service = request.app.state.service
    return service
