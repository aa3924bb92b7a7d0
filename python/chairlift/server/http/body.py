"""Reading a request's body: bounded, and only JSON that means one thing."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from chairlift.server.errors import ApiError
from chairlift.server.service import service_of

MAX_SECONDS = 20
"""How long a body may take to arrive."""


async def read_json(request: Request, *, queued: bool = True) -> dict[str, Any]:
    """The body as an object; raises ApiError 400, 408, 413 or 415, and Starlette's ClientDisconnect.

    A request that will wait for the engine (`queued`) must find the server taking requests, and takes its place in the queue
    before anything is done with its body: raises ApiError 429 or 503, too.
    """
    if queued:
        service_of(request).lifecycle.check_admission()
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        # A web page may send text/plain anywhere without asking; JSON it may not.
        raise ApiError(415, "send the body with Content-Type: application/json", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not read; send plain JSON", code="unsupported_media_type")
    raw = await _read(request)
    request.state.context.body_received()
    if queued:
        request.state.ticket.take()
        service_of(request).preparing.add(request.state.tenant, request.state.context)
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
        async with asyncio.timeout(MAX_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        message = f"the body did not arrive within {MAX_SECONDS} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot serve another request.
    message = f"the body is larger than {limit} bytes, the limit that the server's --max-body-size sets"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})
