"""One server behind the gate: its limits, its health, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import http_writer
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from chairlift.errors import ChairliftError, InvalidSetting
from chairlift.gate.limits import Limits, merged, of_llama_cpp, of_metrics, of_models, of_sglang
from chairlift.server.http.sockets import end_if_gone

log = logging.getLogger("chairlift")

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 4.0
"""Seconds that an idle connection is kept: fewer than the 5 after which vLLM and llama.cpp close it, perhaps under a new request."""
PROBE_SECONDS = 2.0
"""Interval at which an upstream is asked whether it is ready. No inference server restarts in less time."""
NOT_READY = (502, 503, 504)
"""Statuses that say that a server is not ready: its own, or those of a proxy in front of it."""
DISCOVERY_SECONDS = 10.0
LONGEST_PAGE = 8 << 20
"""Bytes of a page of metrics or settings that are read."""
READ_BYTES = 1 << 16
"""Maximum bytes of one read of an answer. For asyncio's 256 KiB the C library maps new memory, which takes 13 us for each event."""

_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "expect"),
    }
)
"""Headers that belong to one connection (RFC 9110, section 7.6.1), those that the client library sets, and `expect`: the body is here."""

FAILURES = (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError)
"""What aiohttp raises for a request that failed on the way: see `failure`."""

RawHeaders = list[tuple[bytes, bytes]]


class UpstreamFailed(ChairliftError):
    """The upstream could not be reached, its answer is no HTTP, or it is not ready."""

    def __init__(self, message: str, *, down: bool = False, retry: bool = True) -> None:
        """`down` if no connection can be made, or the upstream says that it is not ready. `retry` if another upstream may do better."""
        super().__init__(message)
        self.down, self.retry = down, retry


class Upstream:
    """A server with a base address. `close` it at the end."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`api_key`, or else the user and password in `url`, replace what clients send as their key.

        Raises InvalidSetting for a key that is no line of text.
        """
        if api_key is not None and not api_key.isprintable():  # a line break would end the head of a request
            raise InvalidSetting("--upstream-api-key must be one line of printable characters")
        parts = URL(url)
        self.url = without_secrets(url)
        """Clients and logs get to see it."""
        self.healthy = True
        """Whether the newest connection could be made, and nothing says that it is not ready."""
        self.drained = False
        """Whether the operator has taken it out."""
        self.was_down = False
        """Whether it was down since it was ready the last time. It may have restarted then, with an empty cache."""
        self._ask_now = asyncio.Event()
        self._authorization = None if api_key is None else f"Bearer {api_key}"
        if api_key is None and (parts.user or parts.password):
            self._authorization = "Basic " + b64encode(f"{parts.user or ''}:{parts.password or ''}".encode()).decode()
        self._session: aiohttp.ClientSession | None = None

    @property
    def usable(self) -> bool:
        """Whether it gets new requests."""
        return self.healthy and not self.drained

    async def limits_when_ready(self) -> Limits:
        """Asks for the limits, as vLLM, SGLang, llama.cpp and Chairlift report them. Raises UpstreamFailed if the upstream is unreachable.

        Waits while `/health` says that it is not ready, as it does while a model is loaded.
        """
        reported = False
        while (status := (await self._get("/health"))[0]) in NOT_READY:
            if not reported:
                log.info("waiting for %s, whose /health is %d", self.url, status)
            reported = True
            await asyncio.sleep(PROBE_SECONDS)
        return await self._limits()

    async def _limits(self) -> Limits:
        found = of_metrics(await self._page("/metrics"))
        for path, read in (("/get_server_info", of_sglang), ("/props", of_llama_cpp), ("/v1/models", of_models)):
            if found.kv_tokens is None or found.max_model_len is None:
                found = merged(found, read(await self._json(path)))
        return found

    def request(self, method: str, target: str, headers: RawHeaders, body: bytes | bytearray) -> Any:
        """Sends a request on; a context manager of aiohttp's response, whose bytes are as the upstream sent them.

        `target` begins with a slash.
        """
        sent = [(name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in passed_on(headers)]
        if self._authorization is not None:
            sent = [(name, value) for name, value in sent if name not in ("authorization", "x-api-key")]
            sent.append(("authorization", self._authorization))
        url = URL(self.url + target, encoded=True)  # otherwise a/../b would become b, which the gate may treat in another way
        return self._client().request(method, url, headers=sent, data=bytes(body) or None, allow_redirects=False)

    async def until_next_probe(self) -> None:
        """Returns when it is time to ask again whether the upstream is ready: after the interval, or when it has failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_SECONDS):
                await self._ask_now.wait()
        self._ask_now.clear()

    def ask_now(self) -> None:
        """Has the upstream asked at once whether it is ready, because a connection to it failed."""
        self._ask_now.set()

    async def check_ready(self) -> None:
        """Raises UpstreamFailed if `/health` cannot be reached or says that it is not ready, as it does while a model is loaded."""
        if (status := (await self._get("/health"))[0]) in NOT_READY:
            raise UpstreamFailed(f"the upstream {self.url} is not ready ({status})", down=True)

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_socket),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def _get(self, path: str) -> tuple[int, str]:
        """A page's status and text."""
        headers = {} if self._authorization is None else {"authorization": self._authorization}
        try:
            timeout = aiohttp.ClientTimeout(total=DISCOVERY_SECONDS, sock_connect=CONNECT_SECONDS)
            async with self._client().get(self.url + path, headers=headers, allow_redirects=False, timeout=timeout) as response:
                data = bytearray()
                while len(data) < LONGEST_PAGE and (more := await response.content.read(LONGEST_PAGE - len(data))):
                    data += more  # one read gives no more than has come
                return response.status, data.decode("utf-8", "replace")
        except FAILURES as error:
            raise UpstreamFailed(f"{self.url} cannot be reached ({_reason(error)})", down=_cannot_connect(error)) from None

    async def _page(self, path: str) -> str:
        """A page's text, empty if the upstream has none."""
        status, text = await self._get(path)
        return text if status == 200 else ""

    async def _json(self, path: str) -> Any:
        try:
            return json.loads(await self._page(path))
        except (ValueError, RecursionError):
            return None


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose connection fails if the other machine is gone."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    end_if_gone(made)
    return made


def passed_on(headers: RawHeaders) -> RawHeaders:
    """The headers that are passed on: all but those of the connection, and those that it names."""
    named = {token.strip().lower() for name, value in headers if name.lower() == b"connection" for token in value.split(b",")}
    dropped = {*(name.encode() for name in _HOP_BY_HOP), *named}
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _head(status_line: str, headers: Mapping[str, str]) -> bytes:
    """The bytes of a request's head. aiohttp's own function leaves out the bytes of values that are not UTF-8.

    Raises ValueError, as that does, for a line break, which would end the head.
    """
    lines = [status_line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    if any(character in line for line in lines for character in "\r\n\0"):
        raise ValueError("a header has a line break or a null character")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape")


http_writer._serialize_headers = _head


def without_secrets(url: str) -> str:
    """An upstream's address without user and password, written in one way. Raises ValueError for what is no address."""
    return str(URL(url).with_user(None)).rstrip("/").removesuffix("/v1")


def failure(url: str, error: Exception) -> UpstreamFailed:
    """The error of a request that failed on the way. No other upstream gets a request that was answered, if not in HTTP."""
    retry = not isinstance(error, aiohttp.ClientResponseError | HttpProcessingError)
    return UpstreamFailed(f"the upstream {url} failed ({_reason(error)})", down=_cannot_connect(error), retry=retry)


def _cannot_connect(error: Exception) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def check_head(response: aiohttp.ClientResponse) -> None:
    """Raises UpstreamFailed for the head of an answer that HTTP, or the gate's own server, does not allow."""
    fault = None
    if not 200 <= response.status < 600:
        fault = f"its answer has the status {response.status}"
    elif any(b"\v" in value or b"\f" in value for _, value in response.raw_headers):
        fault = "a header of its answer has a control character"
    elif response.headers.get("transfer-encoding", "chunked").lower() not in ("chunked", "identity"):
        fault = "its answer has a transfer coding besides chunks"
    if fault is not None:
        raise UpstreamFailed(f"the upstream {without_secrets(str(response.url.origin()))} failed ({fault})", retry=False)


def prepare_body(response: aiohttp.ClientResponse) -> None:
    """Has the body read in small pieces, and fail if the connection ends first: aiohttp 3.14 waits for ever after a wrong chunk."""
    connection = response.connection
    closed = connection.protocol.closed if connection is not None and connection.protocol is not None else None
    if connection is None or closed is None:  # the answer has ended
        return
    if connection.transport is not None:
        connection.transport.max_size = READ_BYTES  # type: ignore[attr-defined]

    def fail(closed: asyncio.Future[None]) -> None:
        error = None if closed.cancelled() else closed.exception()  # asyncio logs an exception that is not retrieved
        body = response.content
        if not body.is_eof() and body.exception() is None:
            body.set_exception(error or aiohttp.ClientPayloadError())

    closed.add_done_callback(fail)


def _reason(error: BaseException) -> str:
    """Why a request failed, without what was sent or received: that may be secret."""
    match error:
        case TimeoutError():
            return "no answer in time"
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection"
        case aiohttp.ClientResponseError() | aiohttp.ClientPayloadError() | HttpProcessingError():
            return "its answer is not valid HTTP"
    return (str(error) or type(error).__name__)[:200]
