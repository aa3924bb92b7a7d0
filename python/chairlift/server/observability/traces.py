"""OpenTelemetry traces: a span for each sequence, with a child span for each state of its timeline.

The timeline has the total time of each state, not when it occurred. The child spans are laid end to end, waiting first: their lengths and
their sum are exact, their positions are not if the sequence was preempted. The parent span's times and its `first_token` event are exact.
"""

from __future__ import annotations

import asyncio
import logging
import time
from importlib import util
from typing import TYPE_CHECKING, Any

from chairlift.errors import ChairliftError, InvalidSetting, pip_install
from chairlift.outputs import Timeline
from chairlift.server.observability.request_context import RequestContext
from chairlift.timeline import STATES

if TYPE_CHECKING:
    from chairlift.engine.replicated_engine import ReplicatedEngine

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT = 3.0
"""Seconds that an export may take; the server's shutdown waits for it."""

_SPANS_PER_YIELD = 8
"""Sequences that are exported before others get a turn."""


def check_installed() -> None:
    """Raises InvalidSetting if OpenTelemetry is not installed. Imports little of it."""
    try:
        found = util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:  # a package above it is missing
        found = None
    if found is None:
        raise InvalidSetting(f"--otlp-traces-endpoint needs OpenTelemetry: {pip_install('otel')}")


class Traces:
    """Exports the traces of one server."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the URL for OTLP over HTTP, including `/v1/traces`."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": "chairlift"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT)))
        self._tracer = self._provider.get_tracer("chairlift")
        self._tasks: set[asyncio.Task[None]] = set()

    def trace_request(self, engine: ReplicatedEngine, model: str, engine_id: str, request_context: RequestContext | None) -> None:
        """Exports the sequences of a request that is over, once the engine has returned their timelines."""
        task = asyncio.create_task(self._export(engine, model, engine_id, request_context))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Exports all pending spans."""
        await asyncio.gather(*self._tasks)
        await asyncio.to_thread(self._provider.shutdown)

    async def _export(self, engine: ReplicatedEngine, model: str, engine_id: str, request_context: RequestContext | None) -> None:
        try:
            timelines = await engine.explain(engine_id)
        except ChairliftError as error:
            logger.debug("no trace of %s: %s", engine_id, error)
            return
        for index, timeline in enumerate(timelines):
            if index % _SPANS_PER_YIELD == _SPANS_PER_YIELD - 1:
                await asyncio.sleep(0)
            self.send(timeline, model, engine_id, request_context)

    def send(self, timeline: Timeline, model: str, engine_id: str, request_context: RequestContext | None) -> None:
        """Exports one sequence's span with its children."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(request_context.trace if request_context else {})
        clock_offset = time.time_ns() - time.monotonic_ns()

        def wall(seconds: float) -> int:
            return int(seconds * 1e9) + clock_offset

        attributes = self._attributes(timeline, model, engine_id, request_context)
        span = self._tracer.start_span("llm_request", context, SpanKind.SERVER, attributes, start_time=wall(timeline.arrived))
        if timeline.first_token is not None:
            span.add_event("first_token", timestamp=wall(timeline.first_token))
        inner_context = set_span_in_context(span, context)
        at = timeline.arrived
        for state in STATES:
            if seconds := timeline.states.get(state, 0.0):
                child = self._tracer.start_span(state, inner_context, attributes={"chairlift.seconds": seconds}, start_time=wall(at))
                at += seconds
                child.end(wall(at))
        span.end(wall(timeline.arrived + sum(timeline.states.values()) if timeline.ended is None else timeline.ended))

    def _attributes(self, timeline: Timeline, model: str, engine_id: str, request_context: RequestContext | None) -> dict[str, Any]:
        """Returns a span's attributes: OpenTelemetry's names for generative AI where they exist, then chairlift's."""
        times = {"time_to_first_token": timeline.first_token, "e2e": timeline.ended}
        latencies = {f"gen_ai.latency.{name}": at - timeline.arrived for name, at in times.items() if at is not None}
        if timeline.started is not None:
            latencies["gen_ai.latency.time_in_queue"] = timeline.started - timeline.submitted
        own = (
            *("tenant", "priority", "cached_tokens", "computed_tokens", "recomputed_tokens"),
            *("preemptions", "swaps", "block_seconds", "compute_seconds"),
        )
        return {
            "gen_ai.request.model": model,
            "gen_ai.response.id": engine_id,
            "gen_ai.response.finish_reasons": [timeline.finish or "unknown"],
            "gen_ai.usage.input_tokens": timeline.prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.output_tokens,
            **latencies,
            **{f"chairlift.{name}": getattr(timeline, name) for name in own},
            **({"chairlift.request_id": request_context.request_id} if request_context else {}),
        }
