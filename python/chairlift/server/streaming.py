"""Streams answers as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.server.errors import ApiError, api_error, for_route
from chairlift.server.http.responses import json_pieces, to_json_bytes

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

FIRST_EVENT_TIMEOUT = 1.0
"""Seconds that the response headers wait for the first event.

The engine may still reject an admitted request (queued prompt tokens, an impossible deadline, non-finite logits). An error within this
time gets its own HTTP status.
"""

KEEP_ALIVE_SECONDS = 10.0
"""Seconds without an event after which a comment is sent, so that proxies and clients keep the connection."""


def event(data: Mapping[str, Any]) -> bytes:
    """Returns one server-sent event with `data` as JSON."""
    return b"data: " + to_json_bytes(data) + b"\n\n"


def typed_event(data: Mapping[str, Any]) -> bytes:
    """Returns one server-sent event named by the `type` of its data, as in Anthropic's API and OpenAI's Responses API."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


async def large_event(data: Mapping[str, Any], *, typed: bool = False) -> bytes:
    """Returns the event that `event`, or `typed_event`, makes of data that may have megabytes; the event loop goes on meanwhile."""
    head = b"event: " + str(data["type"]).encode() + b"\n" if typed else b""
    return head + b"data: " + await asyncio.to_thread(lambda: b"".join(json_pieces(data))) + b"\n\n"


class EventTemplate:
    """Serializes events that differ only in one text: the JSON around the text is encoded once. Most events are of this kind."""

    PLACEHOLDER = "\0"
    """Marks the positions of the text in the data of the template."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._parts = event(data).split(to_json_bytes(self.PLACEHOLDER))

    def fill(self, text: str) -> bytes:
        """Returns the event with `text`."""
        return to_json_bytes(text).join(self._parts)


class EventStream(Response):
    """A response of server-sent events. An error before the first event becomes the response, a later one the last event."""

    media_type = "text/event-stream"

    @staticmethod
    def error_event(envelope: Mapping[str, Any]) -> bytes:
        """Returns the event that ends the stream with an error."""
        return (typed_event if "type" in envelope else event)(envelope)

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        late_headers: Callable[[], Awaitable[Mapping[str, str]]] | None = None,
    ) -> None:
        """`late_headers` returns further headers if no event has come when the headers are sent."""
        # x-accel-buffering tells reverse proxies not to buffer events.
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._late_headers = late_headers
        self._sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        async with aclosing(self._events) as events:
            first = asyncio.ensure_future(anext(events))
            try:
                await asyncio.wait((first,), timeout=FIRST_EVENT_TIMEOUT)
                if first.done():
                    first.result()
                elif self._late_headers is not None:
                    self.headers.update(await self._late_headers())
            except Exception as error:
                await for_route(client_error(error), scope).response()(scope, receive, send)
            else:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                # Middleware only needs the start and the end of the response. Events skip it: there is one for each token.
                raw_send = scope.get("state", {}).get("raw_send", send)
                # In a task of its own a token does not pass through the coroutines of all middleware.
                await asyncio.create_task(self._body(first, events, scope, raw_send, send), name=scope["path"])
            finally:
                # A generator cannot be closed while it is running.
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def _body(self, first: Awaitable[bytes], events: AsyncGenerator[bytes], scope: Scope, raw_send: Send, send: Send) -> None:
        now = asyncio.get_running_loop().time
        self._sent = now()
        keep_alives = asyncio.create_task(self._send_keep_alives(raw_send))
        try:
            data = await first
            self._sent = now()
            await raw_send({"type": "http.response.body", "body": data, "more_body": True})
            async for data in events:
                self._sent = now()
                await raw_send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            envelope = for_route(client_error(error), scope).envelope
            await send({"type": "http.response.body", "body": self.error_event(envelope), "more_body": True})
        finally:
            keep_alives.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_keep_alives(self, send: Send) -> None:
        """Sends an SSE comment whenever the stream was silent for `KEEP_ALIVE_SECONDS`."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._sent + KEEP_ALIVE_SECONDS - now()))
            if now() >= self._sent + KEEP_ALIVE_SECONDS:
                self._sent = now()
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})


class JsonLines(EventStream):
    """A response of JSON objects, one on each line."""

    media_type = "application/x-ndjson"

    @staticmethod
    def error_event(envelope: Mapping[str, Any]) -> bytes:
        """Returns the line that ends the stream with an error."""
        return to_json_bytes(envelope) + b"\n"

    async def _send_keep_alives(self, send: Send) -> None:
        """Sends nothing: every line must be an object."""


def client_error(error: Exception) -> ApiError:
    """Returns what a client sees of an error that ends its stream; an unexpected error is logged in full."""
    shown = api_error(error)
    if shown.status == 500:
        logger.error("a stream failed", exc_info=error)
    return shown
