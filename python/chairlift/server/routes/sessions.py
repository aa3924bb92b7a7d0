"""POST /close_session: a client says that it will not go on with a session."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.http.body import read_fields
from chairlift.server.http.responses import Json, ignored_header
from chairlift.server.schema.fields import Fields
from chairlift.server.service import service_of
from chairlift.server.session_name import MAX_LENGTH


class CloseSessionRequest(Fields):
    """POST /close_session."""

    session_id: Annotated[str, Field(min_length=1, max_length=MAX_LENGTH)]


async def close_session(request: Request) -> Response:
    """Ends a session of the tenant. A session that is not known has no effect, so a client may close one twice."""
    body, ignored = await read_fields(request, CloseSessionRequest, queued=False, counted=False)
    service_of(request).end_session(request.state.tenant, body.session_id)
    return Json({"session_id": body.session_id}, headers=ignored_header(ignored))
