"""GET /v1/requests/{name}/explain: where a request's time went."""

from __future__ import annotations

from dataclasses import asdict, replace

from starlette.requests import Request
from starlette.responses import Response

from chairlift.outputs import Timeline
from chairlift.server.errors import ApiError, brief
from chairlift.server.http.responses import Json
from chairlift.server.keys import HIDDEN_TENANT
from chairlift.server.observability.explanation import summary_before_submission, summary_line, summary_text
from chairlift.server.registry import MAX_REQUESTS
from chairlift.server.service import service_of


async def explain(request: Request) -> Response:
    """Returns the timelines of a request's sequences by answer id or X-Request-Id, why it was refused, or that it is being tokenized.

    A tenant finds only its own requests.
    """
    name: str = request.path_params["name"]
    service = service_of(request)
    tenant: str = request.state.tenant
    if (context := service.registry.preparing(tenant, name)) is not None:
        states = context.elapsed()
        explanation = {"id": name, "object": "request.explanation", "summary": summary_before_submission(states)}
        return Json({**explanation, "preparing": {"state": "tokenize", "states": states}, "sequences": []})
    if (refusal := service.registry.refusal(tenant, name)) is not None:
        return Json(refusal.explanation(name))
    answer_id, all_timelines, model = await service.explain(tenant, name)
    timelines = [_visible_to(tenant, timeline) for timeline in all_timelines if tenant in ("", timeline.tenant)]
    if not timelines:
        message = f"no request {brief(name)} is known: give the id of an answer, or its X-Request-Id, of the last {MAX_REQUESTS} requests"
        raise ApiError(404, message, code="request_not_found")
    others = await model.engine.explain_sequences(sorted({tag for timeline in timelines for tag in timeline.preempted_by}))
    tenants = {other.tag: _tenant_name(tenant, other.tenant) for other in others}
    sequences = [asdict(timeline) | {"summary": summary_line(timeline, tenants)} for timeline in timelines]
    return Json({"id": answer_id, "object": "request.explanation", "summary": summary_text(timelines, tenants), "sequences": sequences})


def _tenant_name(reader: str, tenant: str) -> str:
    return tenant if reader in ("", tenant) or not tenant else HIDDEN_TENANT


def _visible_to(reader: str, timeline: Timeline) -> Timeline:
    """Replaces the names of other tenants in `queued_behind`, whose times it sums, and in `served_first`."""
    queued_behind: dict[str, float] = {}
    for tenant, seconds in timeline.queued_behind.items():
        name = _tenant_name(reader, tenant)
        queued_behind[name] = queued_behind.get(name, 0.0) + seconds
    served_first = tuple((tag, _tenant_name(reader, tenant), rule) for tag, tenant, rule in timeline.served_first)
    return replace(timeline, queued_behind=queued_behind, served_first=served_first)
