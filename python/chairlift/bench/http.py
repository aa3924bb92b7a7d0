"""A minimal HTTP/1.1 client, because a slow client makes its server look slow. `benches/client.py` measures it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from chairlift.errors import InvalidSetting

MAX_IDLE = 2.0
"""Seconds of idleness after which a connection is not reused: a server may be closing it."""

MAX_HEAD_BYTES = 64 * 1024


class Malformed(Exception):
    """The response is no HTTP/1.1."""


class Unreachable(OSError):
    """The connection failed."""


class Response:
    """An incremental parser of a response: status, headers and body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._rest = b""
        self._body_left: int | None = 0
        """Remaining bytes of the body; None if it ends with the connection."""
        self._chunked = False

    def feed(self, data: bytes) -> bytes:
        """Parses `data` and returns its part of the body. Raises Malformed."""
        data = self._rest + data if self._rest else data
        self._rest = b""
        if not self.status:
            head, separator, data = data.partition(b"\r\n\r\n")
            if not separator:
                if len(head) > MAX_HEAD_BYTES:
                    raise Malformed(f"headers of more than {MAX_HEAD_BYTES} bytes")
                self._rest = head
                return b""
            self._read_head(head)
            if not self.status:  # an interim response such as "100 Continue"
                return self.feed(data)
        if self._chunked:
            return self._chunks(data)
        if self._body_left is not None:
            data = data[: self._body_left]
            self._body_left -= len(data)
            self.done = not self._body_left
        return data

    def close(self) -> None:
        """Handles the end of the connection, which can be the end of the body."""
        self.done = self.done or bool(self.status and self._body_left is None)

    @property
    def reusable(self) -> bool:
        """Whether the connection can be reused."""
        return self.done and self._body_left is not None and self.headers.get("connection", "").lower() != "close"

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise Malformed(f"expected HTTP/1.1, got {first!r:.60}")
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(rest[:3])
        if status < 200:
            return
        self.status = status
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        self._body_left = 0 if self._chunked or status in (204, 304) else int(length) if length and length.isdigit() else None
        self.done = self._body_left == 0 and not self._chunked

    def _chunks(self, data: bytes) -> bytes:
        body, at = [], 0
        while (end := data.find(b"\r\n", at)) >= 0:
            try:
                size = int(data[at:end].partition(b";")[0], 16)
                if size < 0:
                    raise ValueError
            except ValueError:
                raise Malformed(f"a chunk begins with {data[at:end]!r:.40}") from None
            if not size:
                self.done = data.find(b"\r\n\r\n", end) >= 0
                break
            if len(data) < end + size + 4:
                break
            body.append(data[end + 2 : end + 2 + size])
            at = end + size + 4
        self._rest = data[at:]
        return b"".join(body)


class Events:
    """An incremental parser of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The values of the complete `data:` lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True)
class Address:
    """The address of a server."""

    host: str
    port: int
    path: str
    """The prefix of each route's path."""
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parses `http://host:port/path`; raises InvalidSetting."""
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise InvalidSetting(f"--base-url {url}: expected something like http://127.0.0.1:8000")
        return cls(parts.hostname, port, parts.path.rstrip("/"), parts.scheme == "https")

    @property
    def authority(self) -> str:
        """Host and port for the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Connection(asyncio.Protocol):
    """A connection, for one exchange after the other."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.response = Response()
        self.on_body: Callable[[Response, bytes, float], None] = _ignore
        self.ended: asyncio.Future[None] | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.ended is None or self.ended.done():
            self.transport.abort()  # unexpected data
            return
        try:
            if body := self.response.feed(data):
                self.on_body(self.response, body, now)
        except Exception as error:  # raised by `exchange`
            self.ended.set_exception(error)
            return
        if self.response.done:
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended is None or self.ended.done():
            return
        self.response.close()
        if self.response.done:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc or ConnectionResetError("the connection was closed before the end of the response"))


def _ignore(response: Response, body: bytes, now: float) -> None:
    """Ignores the body."""


class Http:
    """A pool of connections to one server, for one event loop."""

    def __init__(self, address: Address, headers: Mapping[str, str], *, insecure: bool = False) -> None:
        self._address = address
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"host": address.authority, **headers}.items())
        self._idle: list[_Connection] = []
        self._peer = (address.host, address.port)
        self._tls: ssl.SSLContext | None = None
        if address.tls:
            self._tls = ssl._create_unverified_context() if insecure else ssl.create_default_context()

    def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a request for `exchange`, with `headers` in addition to those of all requests."""
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        own = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        return f"{method} {self._address.path}{path} HTTP/1.1\r\n{self._head}{own}{length}\r\n".encode() + body

    async def exchange(self, request: bytes, on_body: Callable[[Response, bytes, float], None]) -> Response:
        """Sends a request and returns at the end of the response. `on_body` gets each part of the body and the time of its arrival.

        Raises Unreachable, OSError if the connection breaks, Malformed, and what `on_body` raises.
        """
        connection = self._pop_idle() or await self._connect()
        connection.response, connection.on_body = Response(), on_body
        connection.ended = asyncio.get_running_loop().create_future()
        try:
            connection.transport.write(request)
            await connection.ended
        finally:
            if connection.response.reusable and connection.ended.done() and not connection.transport.is_closing():
                connection.idle_since = time.perf_counter()
                self._idle.append(connection)
            else:
                connection.transport.abort()
        return connection.response

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()

    def _pop_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if time.perf_counter() - connection.idle_since < MAX_IDLE and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def _connect(self) -> _Connection:
        try:
            transport, connection = await asyncio.get_running_loop().create_connection(
                _Connection, *self._peer, ssl=self._tls, server_hostname=self._address.host if self._tls else None
            )
        except OSError as error:
            raise Unreachable(str(error)) from None
        # Resolve a name only once: it uses a thread, and other addresses of the name may not listen.
        self._peer = transport.get_extra_info("peername")[:2]
        return connection
