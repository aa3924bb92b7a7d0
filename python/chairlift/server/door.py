"""The way in for every request: its id, its key, its tenant, and the count of those inside."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import InvalidSetting
from chairlift.server.errors import ApiError, brief
from chairlift.server.service import Service

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")

_TENANT = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
# A key may end in the padding of base64, which is no name's.
_NAMED_KEY = re.compile(r"([A-Za-z0-9._:-]{1,64})=([^=].*)")

OPEN_PATHS = frozenset({"/live"})
"""Paths that need no key: whether the process lives is no secret."""


def read_keys(text: str | None) -> dict[str, str]:
    """The keys of `--api-key`, each with its tenant: `NAME=KEY,NAME=KEY`, where a KEY without a name is of no tenant's ("").

    Raises InvalidSetting.
    """
    keys: dict[str, str] = {}
    for entry in [] if text is None else text.split(","):
        named = _NAMED_KEY.fullmatch(entry)
        tenant, key = named.groups() if named else ("", entry)
        if not key or key != key.strip():
            raise InvalidSetting("--api-key: a key must not be empty, nor begin or end with a space (write NAME=KEY,NAME=KEY)")
        if key in keys:
            raise InvalidSetting("--api-key: the same key is there twice; give each tenant its own")
        keys[key] = tenant
    return keys


class Door:
    """ASGI middleware around the whole server; requests behind it have `state.id` and `state.tenant`.

    With `keys` (key to tenant), every route but the open ones wants one of them. Without, or where the key is of no tenant's,
    the header `x-tenant-id` names the tenant.
    """

    def __init__(self, app: ASGIApp, service: Service, keys: Mapping[str, str]) -> None:
        self._app = app
        self._service = service
        self._keys = {key.encode(): tenant for key, tenant in keys.items()}

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

        try:
            tenant = self._tenant(scope["path"], headers)
        except ApiError as refusal:
            await refusal.response()(scope, receive, send_with_id)
            return
        scope["state"] = {**scope.get("state", {}), "id": request_id.decode(), "tenant": tenant}
        with self._service.answering():
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                # The client has its answer. If this went on to uvicorn, it would close a connection that is good for more.
                logger.exception("request %s failed", request_id.decode())

    def _tenant(self, path: str, headers: list[tuple[bytes, bytes]]) -> str:
        """Whose request it is; raises ApiError for those that may not come in."""
        names = [name for name, _ in headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            # Two ideas of where the body ends: what follows may be a request that somebody smuggles in.
            raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other", headers={"connection": "close"})
        if path in OPEN_PATHS:
            return ""
        # A key says more than a header that anybody could send.
        return (self._key_tenant(headers) if self._keys else "") or _named_tenant(headers)

    def _key_tenant(self, headers: list[tuple[bytes, bytes]]) -> str:
        """Whose key came with it; raises ApiError 401."""
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # All are compared, whichever fits: the time says nothing about which are near.
        fitting = [tenant for known, tenant in self._keys.items() if hmac.compare_digest(key.strip(), known)]
        if scheme.lower() == b"bearer" and fitting:
            return fitting[0]
        message = "send the server's API key as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer", "connection": "close"})


def _named_tenant(headers: list[tuple[bytes, bytes]]) -> str:
    """The tenant that the header names, "" without one; raises ApiError 400."""
    given = [value for name, value in headers if name == b"x-tenant-id"]
    if not given:
        return ""
    if len(given) == 1 and _TENANT.fullmatch(given[0]):
        return given[0].decode()
    shown = brief(b", ".join(given).decode("latin-1"))
    message = f"x-tenant-id must be one name of 1 to 64 letters, digits and . _ : -, got {shown}"
    raise ApiError(400, message, param="x-tenant-id", headers={"connection": "close"})


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The client's own id if it is one that can be sent back and logged, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()
