"""GET /v1/requests/{name}/explain: where a request's time went."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.answer import Json
from chairlift.server.errors import ApiError, brief
from chairlift.server.sentence import sentence
from chairlift.server.service import REMEMBERED, service_of


async def explain(request: Request) -> Response:
    """The ledgers of a request's sequences, by the id of its answer or of its X-Request-Id; a tenant finds only its own."""
    name: str = request.path_params["name"]
    answer_id, ledgers = await service_of(request).explain(name)
    tenant: str = request.state.tenant
    sequences = [asdict(ledger) | {"summary": sentence(ledger)} for ledger in ledgers if tenant in ("", ledger.tenant)]
    if not sequences:
        message = f"no request {brief(name)} is known: give the id of an answer, or its X-Request-Id, of the last {REMEMBERED} requests"
        raise ApiError(404, message, code="request_not_found")
    return Json({"id": answer_id, "object": "request.explanation", "sequences": sequences})
