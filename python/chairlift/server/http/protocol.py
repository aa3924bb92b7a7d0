"""uvicorn's HTTP/1.1 protocol with timeouts for stalled clients, and without signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from chairlift.server.errors import ApiError
from chairlift.server.http.connections import MAX_CONNECTIONS, Connections, ConnectionState
from chairlift.server.observability.request_context import FIRST_BYTE
from chairlift.server.work import CURRENT_WORK, WORK, Work

HEADER_BYTES = 16 << 10
"""Maximum size of a request's headers in bytes: all connections may send some at once."""

READ_BYTES = 16 << 10
"""Maximum bytes of one read from a connection."""

HEADERS_SECONDS = 10.0
"""Timeout for headers: from the connection on for the first request, from the first byte on for later ones."""

SPARE_CHUNKS, CHUNK_BYTES = 1024, 64
"""How many chunks of a request's body may be small, if those above this many bytes do not make up for more. Reading one takes 8 us."""

MAX_PIPELINED_BYTES = 1 << 16
"""Bytes of pipelined requests that are read while one is being answered."""

STALL_SECONDS = 60.0
"""How long the writes of one response may wait in all for a client that does not read, in addition to what `READ_RATE` allows."""

READ_RATE = 8192
"""Bytes a second that a client must read once the system's buffers are full. A slow client keeps its model from being unloaded."""

LINGER_SECONDS = 10.0
"""Seconds that a client may go on sending after a response that closes the connection."""

HANDSHAKE_SECONDS = 10.0
"""Timeout for a TLS handshake."""

ACCEPTED_AT_ONCE = 4
"""Connections that asyncio accepts before it goes on with other work, and before any of them is counted. One takes about 60 us."""

BACKLOG = 2048
"""Connections that the system holds until they are accepted."""

_OVERLOADED = ApiError(503, "the server has too many connections: try again later", type="server_error", code="too_many_connections")

# An absolute-form request target (RFC 9112, section 3.2.2): authority without user info, then path and query.
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(/[^?#]*)?(\?[^#]*)?", re.IGNORECASE)


def _response(error: ApiError) -> bytes:
    """Returns the response of an error after which the connection closes."""
    status = f"{error.status} {HTTPStatus(error.status).phrase}"
    body = json.dumps(error.envelope)
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return (head + body).encode()


class HttpServer(uvicorn.Server):
    """uvicorn's server with a limit of connections and without signal handlers.

    uvicorn would refuse connections during shutdown; the supervisor answers 503.
    """

    def __init__(self, config: uvicorn.Config, max_connections: int = MAX_CONNECTIONS) -> None:
        """Serves `HttpProtocol`."""
        config.backlog = ACCEPTED_AT_ONCE
        super().__init__(config)
        self._max_connections = max_connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen. The connections begin TLS themselves: asyncio's are counted only after the handshake."""
        tls, self.config.ssl = self.config.ssl, None
        self.server_state.connections = cast(Any, Connections(self._max_connections, tls))
        await super().startup(sockets)
        for listener in (one for server in self.servers for one in server.sockets):
            with listener.dup() as same:
                same.listen(BACKLOG)  # asyncio has set ACCEPTED_AT_ONCE

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers."""
        yield


_ENDED = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]  # h11 does not list it
"""States of a client whose request has arrived. It is the second if the client proposes another protocol, which no answer accepts."""


class _Connection(h11.Connection):
    """h11's connection state. Chunks of a response body bypass h11, because a stream sends one for each token."""

    _chunked = False
    _spare_chunks = 0.0
    refusal = ApiError(400, "this is not a valid HTTP request", code="invalid_http")
    """The error to send after RemoteProtocolError."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Returns the next event; accepts only HTTP/1.x requests, and converts absolute-form targets. Raises RemoteProtocolError."""
        event = super().next_event()
        if type(event) is h11.Data and event.chunk_start:
            self._count_chunk(len(event.data))
        if type(event) is not h11.Request:
            return event
        self._spare_chunks = SPARE_CHUNKS
        if not event.http_version.startswith(b"1."):
            message = f"HTTP/{event.http_version.decode()} is not supported: use HTTP/1.1"
            self.refusal = ApiError(505, message, code="http_version_not_supported")
            raise h11.RemoteProtocolError(message, error_status_hint=505)
        return event if event.target.startswith(b"/") else _origin_form(event)

    def _count_chunk(self, size: int) -> None:
        """Raises RemoteProtocolError if a body has too many small chunks."""
        self._spare_chunks += size / CHUNK_BYTES - 1
        if self._spare_chunks < 0:
            message = f"the body comes in too many small chunks: send at least {CHUNK_BYTES} bytes in each"
            self.refusal = ApiError(400, message, code="invalid_http")
            raise h11.RemoteProtocolError(message)

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # its overloads say which events give no bytes
        """Serializes an event."""
        if self._chunked and type(event) is h11.Data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        data = super().send(event)
        if type(event) is h11.Response:
            self._chunked = data is not None and b"transfer-encoding: chunked" in data.lower()
        elif type(event) is h11.EndOfMessage:
            self._chunked = False
        return data


def _origin_form(request: h11.Request) -> h11.Request:
    """Converts a request with an absolute-form target to origin form; the target's authority replaces the Host header."""
    match = _ABSOLUTE.fullmatch(request.target)
    if match is None:
        return request
    authority, path, query = match.groups(default=b"")
    headers = [(b"host", authority), *((name, value) for name, value in request.headers if name != b"host")]
    return h11.Request(method=request.method, headers=headers, target=(path or b"/") + query, http_version=request.http_version)


class _LingeringTransport:
    """An asyncio transport whose `close` may linger: while `linger` returns True, the connection stays open for reading.

    Closing a socket with unread data resets the connection, and the client may lose the response.
    """

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._linger = linger
        self._closing = False
        self.write = transport.write  # called for each token: `__getattr__` would cost more than the rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Closes or lingers; a second call always closes."""
        lingers = not self.is_closing() and self._linger()
        self._closing = True
        if not lingers:
            self._transport.close()


class HttpProtocol(H11Protocol):
    """One HTTP connection. h11 limits the size of headers, httptools does not.

    uvicorn's part is made when the first byte arrives: a client may open many connections and send nothing. Until then `transport` is None.
    """

    transport: asyncio.Transport = None  # type: ignore[assignment]  # as in uvicorn

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self.loop = asyncio.get_running_loop()
        self._connections = cast(Connections, arguments["server_state"].connections)
        self._work: Work
        """Counts the time of the request that is read."""
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""
        """Data that came before `_begin`."""
        self._stall_timer: asyncio.TimerHandle | None = None
        self._patience = STALL_SECONDS
        """How long the response's writes may still wait."""
        self._linger_timer: asyncio.TimerHandle | None = None
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection, and begins TLS or awaits the first request."""
        self._raw_transport = cast(asyncio.Transport, transport)
        # h11 needs 1 µs for each byte of a body in one-byte chunks: larger reads would block the event loop.
        self._raw_transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        if not self._connections.enter(self):
            if self._connections.tls is None:  # before a handshake the client could not read it
                self._raw_transport.write(_response(_OVERLOADED))
            self._raw_transport.close()
        elif self._connections.tls is not None:
            self._handshake = self.loop.create_task(self._start_tls(self._connections.tls))
        else:
            self._begin(self._raw_transport)

    async def _start_tls(self, tls: ssl.SSLContext) -> None:
        try:
            transport = await self.loop.start_tls(self._raw_transport, self, tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS)
        except OSError:  # the client is no TLS client, has left, or says nothing
            transport = None
        if transport is None or transport.is_closing():
            self._connections.leave(self)
        else:
            self._begin(transport)
            if self._early:
                self.data_received(self._early)

    def _begin(self, transport: asyncio.Transport) -> None:
        """Starts the timeout for the first request. `transport` is what encrypts, with TLS."""
        self._raw_transport, self._handshake = transport, None
        self._set_header_timer(True)

    def _prepare(self) -> None:
        """Makes what the requests of this connection need."""
        super().__init__(**self._arguments)
        self.conn = _Connection(h11.SERVER, HEADER_BYTES)
        super().connection_made(cast(asyncio.Transport, _LingeringTransport(self._raw_transport, self._linger)))
        # Count any byte beyond the system's buffer as unread, not only those above asyncio's default of 64 KiB.
        self.transport.set_write_buffer_limits(high=1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels all timers."""
        self._connections.leave(self)
        self._set_header_timer(False)
        if self.transport is None:
            return
        super().connection_lost(exc)
        self.resume_writing()
        if self._linger_timer is not None:
            self._linger_timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Feeds data to h11 and restarts the timeouts for headers and for bodies that nobody reads."""
        if self._handshake is not None:
            self._early += data  # asyncio has finished the handshake, but `_start_tls` does not know yet
            return
        if self.transport is None:
            self._prepare()
        if self.transport.is_closing():
            return  # the response is complete; discard further data
        before = self.conn.their_state
        if before in (h11.IDLE, h11.DONE) and not self.conn.trailing_data[0]:
            self._begin_request()
        work, began = self._work, time.perf_counter()
        super().data_received(data)
        if CURRENT_WORK.get() is not work:  # the request has not resumed reading itself, so this callback is not counted as its own
            work.seconds += time.perf_counter() - began
        theirs, ours = self.conn.their_state, self.conn.our_state
        ended = theirs in _ENDED
        ahead = len(self.conn.trailing_data[0]) if ended or theirs is h11.IDLE else 0
        if before is h11.SEND_BODY and ended and ahead:
            self._begin_request()  # a pipelined request follows the body
        self._set_header_timer((theirs is h11.IDLE and ahead > 0) or (theirs is h11.SEND_BODY and ours is h11.DONE))
        if ended and ahead < MAX_PIPELINED_BYTES:
            self.flow.resume_reading()  # uvicorn pauses reading at a pipelined request and would miss a disconnect
        self._update_state()

    def on_response_complete(self) -> None:
        """Awaits the next request."""
        self._connections.set_state(self, ConnectionState.IDLE)
        self._patience = STALL_SECONDS
        super().on_response_complete()
        self._update_state()  # a pipelined request may have begun

    def end(self) -> None:
        """Closes the connection at once, to make room for others."""
        if self.transport is not None and self.conn.our_state is h11.SEND_RESPONSE:
            self._raw_transport.write(_response(_OVERLOADED))
        self._raw_transport.abort()

    def _update_state(self) -> None:
        """Tells the connections whether a request is being received or answered."""
        if self.cycle is None or self.cycle.response_complete:
            state = ConnectionState.IDLE
        else:
            state = ConnectionState.RECEIVING if self.cycle.more_body else ConnectionState.ANSWERING
        self._connections.set_state(self, state)

    def _begin_request(self) -> None:
        """Records the time of the next request's first byte, and counts its work; uvicorn copies both to the request's scope."""
        self._work = Work()
        self.app_state = {**self.app_state, FIRST_BYTE: time.monotonic(), WORK: self._work}

    def shutdown(self) -> None:
        """Called at server shutdown: closes the connection when its response is complete."""
        if self._handshake is not None:
            self._raw_transport.abort()
        elif self.transport is None:
            self._raw_transport.close()
        elif self.transport.is_closing():
            self.transport.close()  # stop lingering
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Called when the client does not read the response."""
        super().pause_writing()
        self._patience += self.transport.get_write_buffer_size() / READ_RATE
        self._stall_timer = self.loop.call_later(self._patience, self._raw_transport.abort)

    def resume_writing(self) -> None:
        """Called when the client has read everything that was sent."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._patience = min(STALL_SECONDS, self._stall_timer.when() - self.loop.time())
            self._stall_timer.cancel()
            self._stall_timer = None

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: clients could flood the log."""

    def send_400_response(self, msg: str) -> None:
        """Rejects a malformed request."""
        self._reject(cast(_Connection, self.conn).refusal)

    def _set_header_timer(self, more: bool) -> None:
        """Starts the header timeout if `more` data is expected and it is not running, or cancels it."""
        if self._header_timer is not None and not more:
            self._header_timer.cancel()
            self._header_timer = None
        elif self._header_timer is None and more:
            self._header_timer = self.loop.call_later(HEADERS_SECONDS, self._on_header_timeout)

    def _on_header_timeout(self) -> None:
        if self.transport is None:
            self._raw_transport.close()
            return
        if self.conn.trailing_data[0]:
            message = f"the headers did not arrive within {HEADERS_SECONDS:g} seconds"
            self._reject(ApiError(408, message, code="request_timeout"))
        else:
            self.transport.close()

    def _reject(self, error: ApiError) -> None:
        """Sends an error, unless a response has begun, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self.transport.write(_response(error))
        self.transport.close()

    def _linger(self) -> bool:
        """If the client is still sending, half-closes the connection, discards input for some seconds and returns True."""
        theirs = self.conn.their_state
        if theirs not in (h11.SEND_BODY, h11.ERROR) and not (theirs is h11.IDLE and self.conn.trailing_data[0]):
            return False
        self._set_header_timer(False)
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, self._raw_transport.abort)
        if self._raw_transport.can_write_eof():
            self._raw_transport.write_eof()
        self.flow.resume_reading()
        return True
