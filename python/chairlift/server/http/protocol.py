"""HTTP as uvicorn speaks it, without its signals, and with an end to the patience for clients that send or read nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from chairlift.server.errors import ApiError
from chairlift.server.observability.request_context import FIRST_BYTE

HEADER_BYTES = 64 << 10
"""How large a request's headers may be together."""

READ_BYTES = 16 << 10
"""How much of what came is read at a time."""

HEADERS_SECONDS = 10.0
"""How long the first headers may take from the connection on, later ones from their first byte on."""

MOST_AHEAD = 1 << 16
"""Bytes of further requests that are taken while one is being answered."""

STALL_SECONDS = 60.0
"""How long a client may take nothing of what was sent to it."""

LINGER_SECONDS = 10.0
"""How long a client may go on sending after an answer that ends the connection."""

# An absolute-form request target (RFC 9112, section 3.2.2): authority without user info, then path and query.
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(/[^?#]*)?(\?[^#]*)?", re.IGNORECASE)


class HttpServer(uvicorn.Server):
    """uvicorn, but signals are ours: it would refuse connections at once instead of answering 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them alone."""
        yield


class _Connection(h11.Connection):
    """h11's state of a connection, but pieces of a chunked body pass it by: they change no state, and a stream sends one a token."""

    _chunked = False
    refusal = ApiError(400, "this is not a valid HTTP request", code="invalid_http")
    """What a client is told whose request raised RemoteProtocolError."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event; a request has an origin-form target, and its version is HTTP/1.x, else raises RemoteProtocolError."""
        event = super().next_event()
        if type(event) is not h11.Request:
            return event
        if not event.http_version.startswith(b"1."):
            message = f"HTTP/{event.http_version.decode()} is not supported: use HTTP/1.1"
            self.refusal = ApiError(505, message, code="http_version_not_supported")
            raise h11.RemoteProtocolError(message, error_status_hint=505)
        return event if event.target.startswith(b"/") else _origin_form(event)

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # its overloads say which events give no bytes
        """The event's bytes."""
        if self._chunked and type(event) is h11.Data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        data = super().send(event)
        if type(event) is h11.Response:
            self._chunked = data is not None and b"transfer-encoding: chunked" in data.lower()
        elif type(event) is h11.EndOfMessage:
            self._chunked = False
        return data


def _origin_form(request: h11.Request) -> h11.Request:
    """The same request as a client sends it that takes this server for the origin; the authority of the target replaces Host."""
    found = _ABSOLUTE.fullmatch(request.target)
    if found is None:
        return request
    authority, path, query = found.groups(default=b"")
    headers = [(b"host", authority), *((name, value) for name, value in request.headers if name != b"host")]
    return h11.Request(method=request.method, headers=headers, target=(path or b"/") + query, http_version=request.http_version)


class _LingeringTransport:
    """asyncio's transport, but `close` asks `linger` first: while that says so, the connection stays open for reading.

    Closing a socket with unread data resets the connection, and the client may lose the answer.
    """

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._linger = linger
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Closes, or lingers; the second call closes in any case."""
        lingers = not self.is_closing() and self._linger()
        self._closing = True
        if not lingers:
            self._transport.close()


class Http(H11Protocol):
    """One connection. h11 bounds the size of headers, which httptools does not."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = _Connection(h11.SERVER, HEADER_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expects a request."""
        self._wire = cast(asyncio.Transport, transport)
        super().connection_made(cast(asyncio.Transport, _LingeringTransport(self._wire, self._linger)))
        # h11 takes a microsecond for each byte of a body in one-byte chunks: 256 KiB at a time would hold up everybody.
        self._wire.max_size = READ_BYTES  # type: ignore[attr-defined]
        # Whatever the system's buffer does not take counts as not read, not only what is more than 64 KiB.
        self.transport.set_write_buffer_limits(high=1)
        self._stalled: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = self.loop.call_later(HEADERS_SECONDS, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what waits for the client."""
        super().connection_lost(exc)
        self._expect(False)
        self.resume_writing()
        if self._lingering is not None:
            self._lingering.cancel()

    def data_received(self, data: bytes) -> None:
        """Takes what came, and expects the rest if it is a part of headers, or of a body that nobody reads."""
        if self.transport.is_closing():
            return  # the client has its answer, and what it still sends is discarded
        before = self.conn.their_state
        if before in (h11.IDLE, h11.DONE) and not self.conn.trailing_data[0]:
            self._begin_request()
        super().data_received(data)
        theirs, ours = self.conn.their_state, self.conn.our_state
        ahead = len(self.conn.trailing_data[0]) if theirs in (h11.IDLE, h11.DONE) else 0
        if before is h11.SEND_BODY and theirs is h11.DONE and ahead:
            self._begin_request()  # behind the end of this one's body
        self._expect((theirs is h11.IDLE and ahead > 0) or (theirs is h11.SEND_BODY and ours is h11.DONE))
        if theirs is h11.DONE and ahead < MOST_AHEAD:
            self.flow.resume_reading()  # uvicorn stops at the next request, and would not see that the client leaves

    def _begin_request(self) -> None:
        """Notes when the first byte of the next request was read: uvicorn copies this into the request's scope."""
        self.app_state = {**self.app_state, FIRST_BYTE: time.monotonic()}

    def shutdown(self) -> None:
        """Closes the connection when its answer is complete; called as the server ends."""
        if self.transport.is_closing():
            self.transport.close()  # lingers no longer
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Called when the client does not read what it gets."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Called when it has read all of it."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: anybody could fill the log with it, and there is nothing to install."""

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP."""
        refusal = cast(_Connection, self.conn).refusal
        self._refuse(f"{refusal.status} {HTTPStatus(refusal.status).phrase}", refusal)

    def _expect(self, more: bool) -> None:
        """Sets the limit for what is to come, if it is not set already, or lifts it."""
        if self._late is not None and not more:
            self._late.cancel()
            self._late = None
        elif self._late is None and more:
            self._late = self.loop.call_later(HEADERS_SECONDS, self._too_late)

    def _too_late(self) -> None:
        if self.conn.trailing_data[0]:
            message = f"the headers did not arrive within {HEADERS_SECONDS:g} seconds"
            self._refuse("408 Request Timeout", ApiError(408, message, code="request_timeout"))
        self.transport.close()

    def _refuse(self, status: str, error: ApiError) -> None:
        """Says why, if no answer is under way, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            body = json.dumps(error.envelope)
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write((head + body).encode())
        self.transport.close()

    def _linger(self) -> bool:
        """Whether the client still sends; if so, tells it that nothing more comes, and discards what it sends for some seconds."""
        theirs = self.conn.their_state
        if theirs not in (h11.SEND_BODY, h11.ERROR) and not (theirs is h11.IDLE and self.conn.trailing_data[0]):
            return False
        self._expect(False)
        self._lingering = self.loop.call_later(LINGER_SECONDS, self._wire.abort)
        if self._wire.can_write_eof():
            self._wire.write_eof()
        self.flow.resume_reading()
        return True

    def _watch(self, size: int) -> None:
        self._stalled = self.loop.call_later(STALL_SECONDS, self._check_progress, size)

    def _check_progress(self, before: int) -> None:
        """Cuts the connection if nothing was read since the buffer had this size."""
        size = self.transport.get_write_buffer_size()
        if size < before:
            self._watch(size)
        else:
            self.transport.abort()
