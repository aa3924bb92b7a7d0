"""JSON responses and the header that lists ignored fields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from urllib.parse import quote

from pydantic_core import to_json
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

_MAX_NAME_LENGTH = 64
_MAX_NAMES = 64

_ROWS = 64
"""Elements of a long list that are serialized at once."""

_CHUNK = 1 << 18
"""Bytes of a large response that are sent at once."""

_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")
"""Line ends of Unicode with their escapes. JSON allows them in strings, but many clients read streams by Python's or JavaScript's lines."""


class Json(JSONResponse):
    """A JSON response."""

    def render(self, content: Any) -> bytes:
        """Serializes `content`."""
        return to_json_bytes(content)


class LargeJson(Json):
    """A JSON response that is serialized and sent in pieces. Make it in a thread."""

    def render(self, content: Any) -> bytes:
        """Serializes `content` without keeping the lock of the interpreter for long."""
        return b"".join(json_pieces(content))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), _CHUNK):
            await send({"type": "http.response.body", "body": bytes(self.body[start : start + _CHUNK]), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Pieces(Response):
    """A response whose body is read while it is sent. An error before the first piece becomes the response.

    Starlette's StreamingResponse imports parts of anyio when the first one is sent, which keeps the event loop for 20 ms.
    """

    def __init__(self, pieces: AsyncGenerator[bytes], size: int, media_type: str, headers: Mapping[str, str]) -> None:
        """The `pieces` are `size` bytes together."""
        super().__init__(media_type=media_type, headers={**headers, "content-length": str(size)})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        async with aclosing(self._pieces) as pieces:
            piece = await anext(pieces, b"")
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await anext(pieces, b"")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Rows:
    """A long list in the content of `json_pieces`, whose elements are made when they are serialized."""

    def __init__(self, elements: Callable[[], Iterable[Any]]) -> None:
        self._elements = elements

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements())


async def large_json(content: Any, headers: Mapping[str, str]) -> LargeJson:
    """Returns a response that may have many megabytes."""
    return await asyncio.to_thread(LargeJson, content, headers=dict(headers))


def to_json_bytes(content: Any) -> bytes:
    """Serializes to JSON; numbers that JSON cannot express (1e999 in a request or in a model's output) become null.

    Lone surrogates cannot occur: requests and tool calls that contain one are rejected, and tokens decode to valid text.
    """
    text = to_json(content, inf_nan_mode="null")
    if not text.isascii():
        for end, escape in _LINE_ENDS:
            text = text.replace(end, escape)
    return text


def json_pieces(content: Any) -> Iterator[bytes]:
    """Serializes like `to_json_bytes`, in pieces: an object's fields and a list's elements one by one, `Rows` a few at a time."""
    if isinstance(content, Mapping) and content:
        before = b"{"
        for name, value in content.items():
            yield before + to_json_bytes(str(name)) + b":"
            yield from json_pieces(value)
            before = b","
        yield b"}"
    elif isinstance(content, list) and content and isinstance(content[0], dict | list):
        before = b"["
        for element in content:
            yield before
            yield from json_pieces(element)
            before = b","
        yield b"]"
    elif isinstance(content, Rows) or (isinstance(content, list) and len(content) > _ROWS):
        elements, before = iter(content), b"["
        while rows := list(islice(elements, _ROWS)):
            yield before + to_json_bytes(rows)[1:-1]
            before = b","
        yield b"[]" if before == b"[" else b"]"
    else:
        yield to_json_bytes(content)


def utc_time(seconds: float) -> str:
    """Returns a time, in seconds since 1970, as clients parse it: `2026-11-01T12:00:00Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def ignored_header(names: list[str]) -> dict[str, str]:
    """Returns the header that lists the request's fields without effect, percent-encoded and limited in length and number."""
    shown = [quote(name[:_MAX_NAME_LENGTH], safe="") or "%00" for name in names[:_MAX_NAMES]]
    if len(names) > _MAX_NAMES:
        shown.append(f"and {len(names) - _MAX_NAMES} more")
    return {"x-chairlift-ignored": ", ".join(shown)} if shown else {}
