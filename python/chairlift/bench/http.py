"""HTTP/1.1 answers as they come in, with little work for each piece: a client that is slow makes its server look slow.

`benches/client.py` measures that work, beside a general client's.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from chairlift.errors import InvalidSetting

IDLE = 2.0
"""Seconds after which a connection is not used again: servers close them after five or more, and a request may meet that."""

HEAD_BYTES = 64 * 1024


class Malformed(Exception):
    """What came is no HTTP/1.1."""


class Unreachable(OSError):
    """No connection came about."""


class Response:
    """An answer, fed with the bytes that come: the status, the headers, and the body piece by piece."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._rest = b""
        self._left: int | None = 0
        """Bytes of the body to come; None where it ends with the connection."""
        self._chunked = False

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body; raises Malformed."""
        data = self._rest + data if self._rest else data
        self._rest = b""
        if not self.status:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                if len(head) > HEAD_BYTES:
                    raise Malformed(f"headers of more than {HEAD_BYTES} bytes")
                self._rest = head
                return b""
            self._read_head(head)
            if not self.status:  # "100 Continue" and the like: the answer follows
                return self.feed(data)
        if self._chunked:
            return self._chunks(data)
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.done = not self._left
        return data

    def close(self) -> None:
        """The connection has ended, which may be the end of the body."""
        self.done = self.done or bool(self.status and self._left is None)

    @property
    def reusable(self) -> bool:
        """Whether the connection takes another request after this."""
        return self.done and self._left is not None and self.headers.get("connection", "").lower() != "close"

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise Malformed(f"the answer begins with {first!r:.60}, which is no HTTP/1.1")
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(rest[:3])
        if status < 200:
            return
        self.status = status
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        self._left = 0 if self._chunked or status in (204, 304) else int(length) if length and length.isdigit() else None
        self.done = self._left == 0 and not self._chunked

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
    """The data of server-sent events, from the body's pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The `data:` lines that are whole now, without the field's name."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    host: str
    port: int
    path: str
    """What comes before each route's path."""
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Reads `http://host:port/path`; raises InvalidSetting."""
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
        """Host and port as the header Host has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Connection(asyncio.Protocol):
    """A connection, which serves one exchange after the other."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.response = Response()
        self.take: Callable[[Response, bytes, float], None] = _ignore
        self.over: asyncio.Future[None] | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.over is None or self.over.done():
            self.transport.abort()  # nobody asked
            return
        try:
            if body := self.response.feed(data):
                self.take(self.response, body, now)
        except Exception as error:  # the caller's affair, who waits for it
            self.over.set_exception(error)
            return
        if self.response.done:
            self.over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.over is None or self.over.done():
            return
        self.response.close()
        if self.response.done:
            self.over.set_result(None)
        else:
            self.over.set_exception(exc or ConnectionResetError("the connection was closed before the answer's end"))


def _ignore(response: Response, body: bytes, now: float) -> None:
    """Takes nothing."""


class Http:
    """Connections to one server, used again where it lets us; for one event loop."""

    def __init__(self, address: Address, headers: Mapping[str, str], *, insecure: bool = False) -> None:
        self._address = address
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"host": address.authority, **headers}.items())
        self._idle: list[_Connection] = []
        self._where = (address.host, address.port)
        self._tls: ssl.SSLContext | None = None
        if address.tls:
            self._tls = ssl._create_unverified_context() if insecure else ssl.create_default_context()

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request, which `exchange` sends."""
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        return f"{method} {self._address.path}{path} HTTP/1.1\r\n{self._head}{length}\r\n".encode() + body

    async def exchange(self, request: bytes, take: Callable[[Response, bytes, float], None]) -> Response:
        """Sends a request and returns when the answer is over; `take` gets each piece of its body and the time when it came.

        Raises Unreachable, OSError where a connection breaks, Malformed, and what `take` raises.
        """
        connection = self._reused() or await self._connect()
        connection.response, connection.take = Response(), take
        connection.over = asyncio.get_running_loop().create_future()
        try:
            connection.transport.write(request)
            await connection.over
        finally:
            if connection.response.reusable and connection.over.done() and not connection.transport.is_closing():
                connection.idle_since = time.perf_counter()
                self._idle.append(connection)
            else:
                connection.transport.abort()
        return connection.response

    def close(self) -> None:
        """Closes what is open and idle."""
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()

    def _reused(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if time.perf_counter() - connection.idle_since < IDLE and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def _connect(self) -> _Connection:
        try:
            transport, connection = await asyncio.get_running_loop().create_connection(
                _Connection, *self._where, ssl=self._tls, server_hostname=self._address.host if self._tls else None
            )
        except OSError as error:
            raise Unreachable(str(error)) from None
        # A name is looked up once: that goes through a thread, and a name may have addresses where nobody listens.
        self._where = transport.get_extra_info("peername")[:2]
        return connection
