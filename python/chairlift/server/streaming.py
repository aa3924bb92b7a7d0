"""Answers as streams of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.server.errors import ApiError, api_error, shaped
from chairlift.server.http.responses import written

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

PATIENCE = 1.0
"""Seconds that a stream's headers wait for its first event.

The door has turned away what finds a full queue, but the engine may still refuse (prompt tokens that wait, a deadline that
nobody could make, logits that are not finite), and answers between two steps: what fails in that time has a status that says so.
"""

QUIET = 10.0
"""Seconds without an event after which a comment shows proxies and clients that the stream lives."""


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event with `data` as JSON."""
    return b"data: " + written(data) + b"\n\n"


def typed_event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event whose name is the `type` of its data, as Anthropic's clients want it and OpenAI's responses have it."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


class Refill:
    """Events that differ by one text: what is around that is written once. Most of a stream's are such, one a token."""

    HOLE = "\0"
    """Stands for the text in the data of the event that is to be refilled."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._before, self._after = event(data).rsplit(written(self.HOLE), 1)

    def event(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + written(text) + self._after


class EventStream(Response):
    """A stream of server-sent events; an error before the first is the answer, and one on the way becomes the last of them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        # x-accel-buffering asks reverse proxies to pass events on as they come.
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        async with aclosing(self._events) as events:
            first = asyncio.ensure_future(anext(events))
            try:
                await asyncio.wait((first,), timeout=PATIENCE)
                if first.done():
                    first.result()
            except Exception as error:
                await shaped(told(error), scope["path"]).response()(scope, receive, send)
            else:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                # What stands around `send` minds an answer's start and end. Between them events pass it by: there is one a token.
                await self._body(first, events, scope["path"], scope.get("state", {}).get("direct", send), send)
            finally:
                # Nobody may close a generator that is still at work.
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def _body(self, first: Awaitable[bytes], events: AsyncGenerator[bytes], path: str, direct: Send, send: Send) -> None:
        now = asyncio.get_running_loop().time
        self._sent = now()
        comments = asyncio.create_task(self._comment(direct))
        try:
            data = await first
            self._sent = now()
            await direct({"type": "http.response.body", "body": data, "more_body": True})
            async for data in events:
                self._sent = now()
                await direct({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            envelope = shaped(told(error), path).envelope
            await send({"type": "http.response.body", "body": (typed_event if "type" in envelope else event)(envelope), "more_body": True})
        finally:
            comments.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment(self, send: Send) -> None:
        """Sends a comment, which clients pass over, whenever there was nothing else for a while."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._sent + QUIET - now()))
            if now() >= self._sent + QUIET:
                self._sent = now()
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})


def told(error: Exception) -> ApiError:
    """What a client is told of an error that ends its stream; the log has more of one that nobody expected."""
    refusal = api_error(error)
    if refusal.status == 500:
        logger.error("a stream failed", exc_info=error)
    return refusal
