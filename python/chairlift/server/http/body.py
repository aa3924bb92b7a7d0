"""Reads JSON request bodies with a size limit and a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from chairlift.server.errors import ApiError, unavailable
from chairlift.server.service import service_of

BODY_TIMEOUT = 20
"""Seconds that a body may take to arrive."""

MAX_BODIES_BYTES = 64 << 20
"""Bytes of all bodies that are arriving, or four times the longest body if that is more."""


@dataclass(eq=False, slots=True)
class _Body:
    """A body that arrives."""

    group: str
    deadline: asyncio.Timeout
    size: int = 0
    refused: bool = False


@dataclass(slots=True)
class _Group:
    """The bodies of some tenants, oldest first."""

    bodies: dict[_Body, None] = field(default_factory=dict)
    size: int = 0


class Bodies:
    """The bodies that are arriving. Their requests are not admitted yet, and so count towards no other limit.

    Beyond `limit` bytes, the oldest body of the group of tenants with the most bytes is refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._groups: dict[str, _Group] = {}

    @contextmanager
    def arriving(self, group: str, deadline: asyncio.Timeout) -> Iterator[_Body]:
        """Counts a body in the block. If the body is refused, `deadline` expires at once."""
        body = _Body(group, deadline)
        self._groups.setdefault(group, _Group()).bodies[body] = None
        try:
            yield body
        finally:
            self._remove(body)

    def add(self, body: _Body, size: int) -> None:
        """Adds bytes that have arrived."""
        if body.refused:
            return
        body.size += size
        self._groups[body.group].size += size
        self._size += size
        while self._size > self._limit:
            largest = max(self._groups.values(), key=lambda group: group.size)
            oldest = next(iter(largest.bodies))
            oldest.refused = True
            oldest.deadline.reschedule(0)
            self._remove(oldest)

    def _remove(self, body: _Body) -> None:
        group = self._groups.get(body.group)
        if group is None or body not in group.bodies:
            return
        del group.bodies[body]
        group.size -= body.size
        self._size -= body.size
        if not group.bodies:
            del self._groups[body.group]


async def read_json(request: Request, *, queued: bool = True, counted: bool = True) -> dict[str, Any]:
    """Reads the body as a JSON object; raises ApiError 400, 408, 413 or 415, and Starlette's ClientDisconnect.

    The request is admitted before its body is parsed, unless it is not `counted`: raises ApiError 429, too. If it is `queued` for the
    engine, it takes a place in the queue: raises ApiError 503, too.
    """
    if queued:
        service_of(request).check_admission()
    _check_media_type(request)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not supported; send plain JSON", code="unsupported_media_type")
    raw = await _read(request)
    request.state.context.body_received()
    if counted:
        request.state.ticket.admit(queued=queued)
    if queued:
        service_of(request).registry.add_preparing(request.state.tenant, request.state.context)
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _check_media_type(request: Request) -> None:
    """Raises ApiError 415 unless the body may be JSON. A body without a Content-Type, as some clients send it, is taken as JSON.

    A web page may send a form, plain text, or a Blob without a type to any site without a preflight request. Forms and text name their
    type, so they are refused. The Blob has no Content-Type, but browsers send an Origin header with every POST (`null` if they hide it),
    which other clients do not send. So no page of another site reaches the server in this way, whether or not it has keys.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.split(";")[0].strip().lower() == "application/json" or not (content_type or "origin" in request.headers):
        return
    raise ApiError(415, "send the body with Content-Type: application/json", code="unsupported_media_type")


async def _read(request: Request) -> bytearray:
    limit: int = request.app.state.max_body_size
    bodies: Bodies = request.app.state.bodies
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT) as deadline:
            with bodies.arriving(request.state.ticket.tenant.group, deadline) as body:
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > limit:
                        raise _too_large(limit)
                    bodies.add(body, len(chunk))
    except TimeoutError:
        if body.refused:
            refusal = unavailable("too many bodies are arriving, and this one was the oldest: try again later", "overloaded", 1)
            refusal.headers["connection"] = "close"
            raise refusal from None
        message = f"the body did not arrive within {BODY_TIMEOUT} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
    return data


def _too_large(limit: int) -> ApiError:
    # The rest of the body stays unread, so the connection cannot be reused.
    message = f"the body is larger than {limit} bytes, the server's --max-body-size"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})
