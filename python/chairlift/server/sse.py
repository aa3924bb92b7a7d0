"""Answers that notice when the client leaves: server-sent events, and any other work."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.server.errors import ApiError, api_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

PATIENCE = 1.0
"""Seconds that a stream's headers wait for its first event: what fails in that time, as in a full queue, has a status that says so."""

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event with `data` as JSON."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does `work`, cancelled at once when the client goes away: then raises ClientGone.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events; an error before the first is the answer, and one on the way becomes the last of them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        # x-accel-buffering asks reverse proxies to pass events on as they come.
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream, or as much of it as the client stays for."""
        try:
            await unless_gone(receive, self._write(scope, receive, send))
        except ClientGone:
            logger.debug("client left a stream")

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = asyncio.ensure_future(anext(events))
            try:
                await asyncio.wait((first,), timeout=PATIENCE)
                if first.done():
                    first.result()
            except Exception as error:
                await _told(error).response()(scope, receive, send)
            else:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await _body(first, events, send)
            finally:
                # Nobody may close a generator that is still at work.
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)


async def _body(first: Awaitable[bytes], events: AsyncGenerator[bytes], send: Send) -> None:
    try:
        await send({"type": "http.response.body", "body": await first, "more_body": True})
        async for data in events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except Exception as error:
        await send({"type": "http.response.body", "body": event(_told(error).envelope), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _told(error: Exception) -> ApiError:
    told = api_error(error)
    if told.status == 500:
        logger.error("a stream failed", exc_info=error)
    return told
