"""GET /v1/requests/{name}/explain: where a request's time went."""

from __future__ import annotations

from dataclasses import asdict, replace

from starlette.requests import Request
from starlette.responses import Response

from chairlift.outputs import Timeline
from chairlift.server.errors import ApiError, brief
from chairlift.server.http.responses import Json
from chairlift.server.keys import ANOTHER
from chairlift.server.observability.explanation import paragraph, preparation, sentence
from chairlift.server.service import REMEMBERED, service_of


async def explain(request: Request) -> Response:
    """The ledgers of a request's sequences, by the id of its answer or of its X-Request-Id.

    Or why it was refused, or that it is being tokenized. A tenant finds only its own.
    """
    name: str = request.path_params["name"]
    service = service_of(request)
    tenant: str = request.state.tenant
    if (context := service.preparing.find(tenant, name)) is not None:
        states = context.elapsed()
        explained = {"id": name, "object": "request.explanation", "summary": preparation(states)}
        return Json({**explained, "preparing": {"state": "tokenize", "states": states}, "sequences": []})
    if (refusal := service.refusals.find(tenant, name)) is not None:
        return Json(refusal.explanation(name))
    answer_id, found = await service.explain(tenant, name)
    ledgers = [_seen_by(tenant, ledger) for ledger in found if tenant in ("", ledger.tenant)]
    if not ledgers:
        message = f"no request {brief(name)} is known: give the id of an answer, or its X-Request-Id, of the last {REMEMBERED} requests"
        raise ApiError(404, message, code="request_not_found")
    others = await service.engine.explain_sequences(sorted({tag for ledger in ledgers for tag in ledger.preempted_by}))
    tenants = {other.tag: _name(tenant, other.tenant) for other in others}
    sequences = [asdict(ledger) | {"summary": sentence(ledger, tenants)} for ledger in ledgers]
    return Json({"id": answer_id, "object": "request.explanation", "summary": paragraph(ledgers, tenants), "sequences": sequences})


def _name(reader: str, tenant: str) -> str:
    return tenant if reader in ("", tenant) or not tenant else ANOTHER


def _seen_by(reader: str, ledger: Timeline) -> Timeline:
    """Without the names of others, whose times are summed."""
    ahead: dict[str, float] = {}
    for tenant, seconds in ledger.queued_behind.items():
        ahead[_name(reader, tenant)] = ahead.get(_name(reader, tenant), 0.0) + seconds
    return replace(ledger, queued_behind=ahead)
