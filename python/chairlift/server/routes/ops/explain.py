"""GET /v1/requests/{name}/explain: where a request's time went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import brief
from chairlift.outputs import Timeline
from chairlift.server.errors import ApiError
from chairlift.server.http.responses import Json, large_json
from chairlift.server.keys import Reader, sees, visible_name
from chairlift.server.observability.explanation import summary_before_submission, summary_line, summary_text
from chairlift.server.registry import MAX_REQUESTS
from chairlift.server.service import service_of

T = TypeVar("T")

_AT_ONCE = 8
"""Timelines that are explained in one callback of the event loop: a request may have a thousand."""


async def explain(request: Request) -> Response:
    """Returns the timelines of a request's sequences by answer id or X-Request-Id, why it was refused, or that it is being tokenized.

    A tenant finds only its own requests.
    """
    # This is all of an empty body. A client that disconnects from here on ends its explanation, which others wait for.
    await request.receive()
    reader: Reader = request.state.reader
    group = None if reader is None else request.state.ticket.tenant.group
    async with service_of(request).explaining(group):
        return await _explanation(request, reader, request.path_params["name"])


async def _explanation(request: Request, reader: Reader, name: str) -> Response:
    service = service_of(request)
    if (context := service.registry.preparing(reader, name)) is not None:
        states = context.elapsed()
        early = {"id": name, "object": "request.explanation", "summary": summary_before_submission(states)}
        return Json({**early, "preparing": {"state": "tokenize", "states": states}, "sequences": []})
    if (refusal := service.registry.refusal(reader, name)) is not None:
        return Json(refusal.explanation(name))
    answer_id, all_timelines, model = await service.explain(reader, name)
    timelines = await _each(lambda timeline: _visible_to(reader, timeline), [one for one in all_timelines if sees(reader, one.tenant)])
    if not timelines:
        message = f"no request {brief(name)} is known: give the id of an answer, or its X-Request-Id, of the last {MAX_REQUESTS} requests"
        raise ApiError(404, message, code="request_not_found")
    others = await model.engine.explain_sequences(sorted({tag for timeline in timelines for tag in timeline.preempted_by}))
    tenants = {other.tag: visible_name(reader, other.tenant) for other in others}
    sequences = await _each(lambda timeline: asdict(timeline) | {"summary": summary_line(timeline, tenants)}, timelines)
    summary = summary_text(timelines, tenants)
    missed: dict[str, Any] = {}
    if (known := service.turns.miss(answer_id)) is not None:
        author, miss = known
        summary += f" {miss.summary()}"
        missed = {"cache_miss": miss.json(with_texts=reader == author)}
    explanation: dict[str, Any] = {"id": answer_id, "object": "request.explanation", "summary": summary, **missed, "sequences": sequences}
    return Json(explanation) if len(sequences) <= _AT_ONCE else await large_json(explanation, {})


async def _each(function: Callable[[Timeline], T], timelines: Sequence[Timeline]) -> list[T]:
    """Applies a function to many timelines; the event loop does other work in between."""
    made = []
    for at, timeline in enumerate(timelines, 1):
        made.append(function(timeline))
        if at % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return made


def _visible_to(reader: Reader, timeline: Timeline) -> Timeline:
    """Hides from a tenant what others did: their names, and which of its prompt tokens they had put into the cache or on disk."""
    if reader is None:
        return timeline
    queued_behind: dict[str, float] = {}
    for tenant, seconds in timeline.queued_behind.items():
        name = visible_name(reader, tenant)
        queued_behind[name] = queued_behind.get(name, 0.0) + seconds
    # Until the first token, the computed tokens would tell where the cached ones end.
    computed = 0 if timeline.first_token is None else timeline.computed_tokens + timeline.cached_tokens - timeline.own_cached_tokens
    states = dict(timeline.states)
    if (reading := states.pop("read_cache", None)) is not None:
        states["wait_step"] = states.get("wait_step", 0.0) + reading
    return replace(
        timeline,
        queued_behind=queued_behind,
        served_first=tuple((tag, visible_name(reader, tenant), rule) for tag, tenant, rule in timeline.served_first),
        cached_tokens=timeline.own_cached_tokens,
        computed_tokens=computed,
        states=states,
    )
