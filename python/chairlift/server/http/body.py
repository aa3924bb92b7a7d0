"""Reads JSON request bodies with a size limit and a timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from chairlift.server.errors import ApiError
from chairlift.server.http.bodies import Bodies
from chairlift.server.schema.fields import Fields
from chairlift.server.service import service_of

BODY_TIMEOUT = 20
"""Seconds that any body may take to arrive."""

BODY_RATE = 32 << 10
"""Bytes that give a body a further second, so that it may arrive on a slow line. The size limit bounds the time in all."""

LARGE = 1 << 14
"""Bytes of a body above which it is parsed and checked in a thread, and refused if its request is not counted."""

MAX_VALUES = 100_000
"""Maximum number of objects, arrays and fields in a body. Parsing holds the lock of the interpreter, for 0.1 s at 2 MiB of empty arrays."""

_VALUE_MARKS = b"[{:"
"""Each object, array and field of a JSON text has one of these outside of strings."""
_OTHER_BYTES = bytes(set(range(256)).difference(_VALUE_MARKS, b'"'))

_ADDED_TYPES = ("", "application/x-www-form-urlencoded", "text/plain", "application/octet-stream")
"""The types of bodies whose client names none: no type, that of `curl -d`, that of `fetch` outside browsers, and that of aiohttp."""

F = TypeVar("F", bound=Fields)
P = ParamSpec("P")
R = TypeVar("R")


async def read_json(
    request: Request, *, queued: bool = True, counted: bool = True, computes: bool = True, required: bool = True
) -> dict[str, Any]:
    """Reads the body as a JSON object; raises ApiError 400, 408, 413 or 415, and Starlette's ClientDisconnect.

    The request is admitted before its body is parsed, unless it is not `counted`: raises ApiError 429, too. If it also `computes`, raises
    ApiError 503 if no model serves or holds new requests. If it is `queued` for the engine, it takes a place in the queue: raises ApiError
    503, too. Unless it is `required`, an empty body is an object without fields.
    """
    if counted and computes:
        service_of(request).check_admission()
    _check_media_type(request)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not supported; send plain JSON", code="unsupported_media_type")
    raw = await read_raw(request, request.app.state.max_body_size if counted else min(LARGE, request.app.state.max_body_size))
    request.state.context.body_received()
    if counted:
        request.state.ticket.admit(queued=queued)
    if queued:
        service_of(request).registry.add_preparing(request.state.tenant, request.state.context)
    request.state.large = len(raw) > LARGE
    return await beside(request, parse, raw) if raw or required else {}


async def read_fields(
    request: Request, fields: type[F], *, queued: bool = True, counted: bool = True, computes: bool = True, required: bool = True
) -> tuple[F, list[str]]:
    """Reads the body as these fields; returns them and the names of unknown ones. Raises what `read_json` raises, and InvalidRequest."""
    body = await read_json(request, queued=queued, counted=counted, computes=computes, required=required)
    return await beside(request, fields.read, body)


async def beside(request: Request, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function whose time depends on the size of the body: of a large body in a thread, so that the event loop goes on."""
    return await asyncio.to_thread(function, *args, **kwargs) if request.state.large else function(*args, **kwargs)


async def read_names(request: Request, *fields: str) -> dict[str, Any]:
    """Reads the body of an operator's request, which has a text in each of these fields; raises ApiError 400."""
    body = parse(await request.body())
    if not all(isinstance(body.get(field), str) and body[field] for field in fields):
        raise ApiError(400, f"the body must be a JSON object with {' and '.join(fields)}", param=fields[0])
    return body


def parse(raw: bytes | bytearray) -> dict[str, Any]:
    """Returns the body; raises ApiError 400."""
    if has_too_many_values(raw):
        raise ApiError(400, f"the body has more than {MAX_VALUES} objects, arrays and fields", code="invalid_json")
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def has_too_many_values(raw: bytes | bytearray) -> bool:
    """Whether a JSON text has more than MAX_VALUES objects, arrays and fields."""
    return sum(map(raw.count, _VALUE_MARKS)) > MAX_VALUES and _num_values(raw) > MAX_VALUES


def _num_values(raw: bytes | bytearray) -> int:
    """Returns the number of objects, arrays and fields of a JSON text; of more than MAX_VALUES, any number above that.

    These are few short calls, because each holds the lock of the interpreter: one regular expression for strings held it for 0.1 s.
    """
    marks = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHER_BYTES)
    # Two quotes in a row are an empty string, or the end of one string and the start of the next: without them the same marks are in
    # strings. What is left has a mark between any two quotes, so a body with few values has few parts.
    parts = marks.replace(b'""', b"").split(b'"', 2 * MAX_VALUES + 2)
    return sum(map(len, parts[::2]))


def _check_media_type(request: Request) -> None:
    """Raises ApiError 415 unless the body may be JSON. A body without a Content-Type, or with one that a client adds by itself, is JSON.

    A web page may send a form, plain text, or a Blob without a type to any site without a preflight request. But browsers send an Origin
    header with every POST (`null` if they hide it), which other clients do not send. So no page of another site reaches the server in this
    way, whether or not it has keys.
    """
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type == "application/json" or (content_type in _ADDED_TYPES and "origin" not in request.headers):
        return
    raise ApiError(415, "send the body with Content-Type: application/json", code="unsupported_media_type")


async def read_raw(request: Request, limit: int) -> bytearray:
    """Reads a body of at most `limit` bytes; raises ApiError 408 or 413, and Starlette's ClientDisconnect."""
    bodies: Bodies = request.app.state.bodies
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    data = bytearray()
    until = asyncio.get_running_loop().time() + BODY_TIMEOUT
    try:
        async with bodies.arriving(request.state.ticket.tenant.group) as body, asyncio.timeout_at(until) as deadline:
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit:
                    raise _too_large(limit)
                bodies.resize(body, len(data))
                deadline.reschedule(until + len(data) / BODY_RATE)
    except BaseException as error:
        data.clear()  # the exception's traceback keeps it until the garbage collector runs
        if isinstance(error, TimeoutError):
            message = f"the body did not arrive within {BODY_TIMEOUT} seconds and one for each {BODY_RATE >> 10} KiB of it"
            raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
        raise
    return data


def _too_large(limit: int) -> ApiError:
    # The rest of the body stays unread, so the connection cannot be reused.
    message = f"the body is larger than {limit} bytes, the most that this route takes (--max-body-size or less)"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})
