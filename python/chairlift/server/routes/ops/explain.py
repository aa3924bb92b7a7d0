"""GET /v1/requests/{name}/explain: where a request's time went."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import brief
from chairlift.outputs import Timeline
from chairlift.server.errors import ApiError
from chairlift.server.http.responses import Json
from chairlift.server.keys import Reader, sees, visible_name
from chairlift.server.observability.explanation import summary_before_submission, summary_line, summary_text
from chairlift.server.registry import MAX_REQUESTS
from chairlift.server.service import service_of


async def explain(request: Request) -> Response:
    """Returns the timelines of a request's sequences by answer id or X-Request-Id, why it was refused, or that it is being tokenized.

    A tenant finds only its own requests.
    """
    name: str = request.path_params["name"]
    service = service_of(request)
    reader: Reader = request.state.reader
    if (context := service.registry.preparing(reader, name)) is not None:
        states = context.elapsed()
        explanation = {"id": name, "object": "request.explanation", "summary": summary_before_submission(states)}
        return Json({**explanation, "preparing": {"state": "tokenize", "states": states}, "sequences": []})
    if (refusal := service.registry.refusal(reader, name)) is not None:
        return Json(refusal.explanation(name))
    answer_id, all_timelines, model = await service.explain(reader, name)
    timelines = [_visible_to(reader, timeline) for timeline in all_timelines if sees(reader, timeline.tenant)]
    if not timelines:
        message = f"no request {brief(name)} is known: give the id of an answer, or its X-Request-Id, of the last {MAX_REQUESTS} requests"
        raise ApiError(404, message, code="request_not_found")
    others = await model.engine.explain_sequences(sorted({tag for timeline in timelines for tag in timeline.preempted_by}))
    tenants = {other.tag: visible_name(reader, other.tenant) for other in others}
    sequences = [asdict(timeline) | {"summary": summary_line(timeline, tenants)} for timeline in timelines]
    summary = summary_text(timelines, tenants)
    missed: dict[str, Any] = {}
    if (known := service.turns.miss(answer_id)) is not None:
        author, miss = known
        summary += f" {miss.summary()}"
        missed = {"cache_miss": miss.json(with_texts=reader == author)}
    return Json({"id": answer_id, "object": "request.explanation", "summary": summary, **missed, "sequences": sequences})


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
