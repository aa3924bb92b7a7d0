"""The way in for every request: its id, its key, and the count of those inside."""

from __future__ import annotations

import hmac
import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.errors import ApiError
from chairlift.server.service import Service

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")

OPEN_PATHS = frozenset({"/live"})
"""Paths that need no key: whether the process lives is no secret."""


class Door:
    """ASGI middleware around the whole server."""

    def __init__(self, app: ASGIApp, service: Service, api_key: str | None) -> None:
        self._app = app
        self._service = service
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers it here."""
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = _request_id(headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send_with_id)
            return
        with self._service.answering():
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                # The client has its answer. If this went on to uvicorn, it would close a connection that is good for more.
                logger.exception("request %s failed", request_id.decode())

    def _refusal(self, path: str, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        names = [name for name, _ in headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            # Two ideas of where the body ends: what follows may be a request that somebody smuggles in.
            return ApiError(400, "Content-Length and Transfer-Encoding exclude each other", headers={"connection": "close"})
        if self._key is None or path in OPEN_PATHS:
            return None
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key):
            return None
        message = "send the server's API key as 'Authorization: Bearer KEY'"
        return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer", "connection": "close"})


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The client's own id if it is one that can be sent back and logged, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()
