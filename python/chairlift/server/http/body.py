"""Reads JSON request bodies with a size limit and a timeout."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from chairlift.server.errors import ApiError
from chairlift.server.service import service_of

BODY_TIMEOUT = 20
"""Seconds that a body may take to arrive."""


async def read_json(request: Request, *, queued: bool = True) -> dict[str, Any]:
    """Reads the body as a JSON object; raises ApiError 400, 408, 413 or 415, and Starlette's ClientDisconnect.

    If the request is `queued` for the engine, it is admitted before its body is parsed: raises ApiError 429 or 503, too.
    """
    if queued:
        service_of(request).check_admission()
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        # Web pages may send text/plain to any site without a preflight request, but not JSON.
        raise ApiError(415, "send the body with Content-Type: application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not supported; send plain JSON", code="unsupported_media_type")
    raw = await _read(request)
    request.state.context.body_received()
    if queued:
        request.state.ticket.admit()
        service_of(request).registry.add_preparing(request.state.tenant, request.state.context)
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


async def _read(request: Request) -> bytes:
    limit: int = request.app.state.max_body_size
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    # The rest of the body stays unread, so the connection cannot be reused.
    message = f"the body is larger than {limit} bytes, the server's --max-body-size"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})
