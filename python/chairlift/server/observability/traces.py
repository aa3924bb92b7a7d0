"""OpenTelemetry: a span for each sequence, with a child for each cause in its ledger.

The ledger knows how long each cause lasted in all, not when. The children are laid end to end, waiting first: their lengths and their
sum are exact, their places are not where a sequence was preempted. The span's own times and its `first_token` event are exact.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from chairlift.errors import ChairliftError, InvalidSetting
from chairlift.outputs import Timeline
from chairlift.server.observability.request_context import RequestContext
from chairlift.timeline import STATES

if TYPE_CHECKING:
    from chairlift.engine.client import AsyncEngine

logger = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds that sending may take: the server's end waits for it."""


class Traces:
    """Where the traces of one server go."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint` is the URL for OTLP over HTTP, `/v1/traces` included; raises InvalidSetting where OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise InvalidSetting("--otlp-traces-endpoint needs OpenTelemetry: pip install 'chairlift[otel]'") from None
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidSetting(f"--otlp-traces-endpoint {endpoint}: expected a URL like http://127.0.0.1:4318/v1/traces")
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "chairlift"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=PATIENCE)))
        self._tracer = self._provider.get_tracer("chairlift")
        self._asking: set[asyncio.Task[None]] = set()

    def follow(self, engine: AsyncEngine, engine_id: str, about: RequestContext | None) -> None:
        """Traces the sequences of a request that is over, however it ended, once the engine has given their ledgers."""
        task = asyncio.create_task(self._ask(engine, engine_id, about))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def close(self) -> None:
        """Sends what was not sent yet."""
        await asyncio.gather(*self._asking)
        await asyncio.to_thread(self._provider.shutdown)

    async def _ask(self, engine: AsyncEngine, engine_id: str, about: RequestContext | None) -> None:
        try:
            ledgers = await engine.explain(engine_id)
        except ChairliftError as error:
            logger.debug("no trace of %s: %s", engine_id, error)
            return
        for ledger in ledgers:
            self.send(ledger, engine_id, about)

    def send(self, ledger: Timeline, engine_id: str, about: RequestContext | None) -> None:
        """One sequence's span, with its children."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(about.trace if about else {})
        behind = time.time_ns() - time.monotonic_ns()

        def wall(seconds: float) -> int:
            return int(seconds * 1e9) + behind

        attributes = self._attributes(ledger, engine_id, about)
        begun = wall(ledger.arrived)
        span = self._tracer.start_span("llm_request", context, SpanKind.SERVER, attributes, start_time=begun)
        if ledger.first_token is not None:
            span.add_event("first_token", timestamp=wall(ledger.first_token))
        inside = set_span_in_context(span, context)
        at = ledger.arrived
        for cause in STATES:
            if seconds := ledger.states.get(cause, 0.0):
                child = self._tracer.start_span(cause, inside, attributes={"chairlift.seconds": seconds}, start_time=wall(at))
                at += seconds
                child.end(wall(at))
        span.end(wall(ledger.arrived + sum(ledger.states.values()) if ledger.ended is None else ledger.ended))

    def _attributes(self, ledger: Timeline, engine_id: str, about: RequestContext | None) -> dict[str, Any]:
        """What is told of a sequence: OpenTelemetry's names for generative AI where there are some, then ours."""
        times = {"time_to_first_token": ledger.first_token, "e2e": ledger.ended}
        named = {f"gen_ai.latency.{name}": at - ledger.arrived for name, at in times.items() if at is not None}
        if ledger.started is not None:
            named["gen_ai.latency.time_in_queue"] = ledger.started - ledger.submitted
        ours = ("tenant", "priority", "cached_tokens", "computed_tokens", "recomputed_tokens", "preemptions", "swaps", "block_seconds")
        return {
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": engine_id,
            "gen_ai.response.finish_reasons": [ledger.finish or "unknown"],
            "gen_ai.usage.input_tokens": ledger.prompt_tokens,
            "gen_ai.usage.output_tokens": ledger.output_tokens,
            **named,
            **{f"chairlift.{name}": getattr(ledger, name) for name in ours},
            **({"chairlift.request_id": about.request_id} if about else {}),
        }
