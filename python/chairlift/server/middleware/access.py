"""The way in for every request: its id, its key, its tenant, its place in the queue, and the count of those inside."""

from __future__ import annotations

import base64
import logging
import re
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.errors import ApiError, brief, shaped
from chairlift.server.http.sockets import is_loopback
from chairlift.server.keys import TENANT, Keys, Tenant
from chairlift.server.middleware.disconnect import while_present
from chairlift.server.observability.request_context import FIRST_BYTE, LOGGED, TRACE_HEADERS, RequestContext
from chairlift.server.service import Service

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")

_Headers = list[tuple[bytes, bytes]]

PROBE_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
"""Paths that never need a key: orchestrators and load balancers ask there, and the answers hold no secret."""

PAGES = frozenset({"/dashboard", "/dashboard/data"})
"""Paths where a browser may send the key as a password. Only there: it sends that with other sites' requests as well."""

MAX_HEADERS = 128
"""Headers of one request; h11 bounds their size, 64 KiB."""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Who may come in: the keys, and for a server without keys on this machine alone, the names and web pages it answers to."""

    keys: Keys = field(default_factory=Keys)
    host: str | None = None
    """What the server is bound to if it must mind the Host header: a web page can give its own name this machine's address."""
    origins: Collection[str] = ()
    """Web pages that may use it; "*" is any."""
    open_paths: Collection[str] = PROBE_PATHS
    """Paths that need no key."""


class AccessMiddleware:
    """ASGI middleware around the whole server; requests behind it have `state.context`, `state.tenant`, `state.ticket`
    and `state.direct`, the server's own `send`.

    With keys, every route but the open ones wants one of them. Without, or where the key is of no tenant's, the header
    `x-tenant-id` names the tenant.
    """

    def __init__(self, app: ASGIApp, service: Service, rules: AccessPolicy) -> None:
        self._app = app
        self._service = service
        self._rules = rules
        self._tenants: Mapping[str, Tenant] = {tenant.name: tenant for tenant in rules.keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers it here."""
        if scope["type"] != "http":
            return
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        headers: _Headers = scope["headers"]
        request_id = _request_id(headers)
        context = _context(request_id.decode(), headers, scope.get("state", {}).get(FIRST_BYTE))
        LOGGED.set(context)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((name, request_id) for name in _id_headers(scope["path"]))]
            await send(message)

        try:
            tenant = self._tenant(scope["path"], headers)
        except ApiError as refusal:
            # Nobody has looked at the body, and nobody will.
            refusal.headers["connection"] = "close"
            if refusal.reason is not None:
                self._service.metrics.rejected(refusal.reason)
            await shaped(refusal, scope["path"]).response()(scope, receive, send_with_id)
            return
        ticket = self._service.admission.ticket(tenant)
        scope["state"] = {"context": context, "tenant": tenant.name, "ticket": ticket, "direct": send}
        with self._service.answering():
            try:
                if not await while_present(self._app, scope, receive, send_with_id):
                    logger.debug("the client of request %s left", request_id.decode())
            except Exception:
                # The client has its answer. If this went on to uvicorn, it would close a connection that is good for more.
                logger.exception("request %s failed", request_id.decode())
            finally:
                ticket.release()
                self._service.preparing.remove(tenant.name, context)

    def _tenant(self, path: str, headers: _Headers) -> Tenant:
        """Whose request it is; raises ApiError for those that may not come in."""
        if len(headers) > MAX_HEADERS:
            raise ApiError(431, f"the request has {len(headers)} headers, and {MAX_HEADERS} are allowed", code="too_many_headers")
        if _given(headers, b"content-length") and _given(headers, b"transfer-encoding"):
            # Two ideas of where the body ends: what follows may be a request that somebody smuggles in.
            raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
        if path in self._rules.open_paths:
            return Tenant()
        if self._rules.host is not None:
            self._check_page(self._rules.host, headers)
        # A key says more than a header that anybody could send.
        if self._rules.keys and (tenant := self._key_tenant(path, headers)).name:
            return tenant
        name = _named_tenant(headers)
        return self._tenants.get(name) or Tenant(name)

    def _key_tenant(self, path: str, headers: _Headers) -> Tenant:
        """Whose key came with it; raises ApiError 401."""
        page = path in PAGES
        given = set(_given(headers, b"x-api-key"))
        for value in _given(headers, b"authorization"):
            scheme, _, key = value.partition(b" ")
            given.add(key.strip() if scheme.lower() == b"bearer" else _password(key) if page else b"")
        tenant = self._rules.keys.tenant(next(iter(given)) if len(given) == 1 else b"")
        if tenant is None:
            # LiteLLM tells a wrong key from a bad request by OpenAI's words.
            fault = "Incorrect API key provided" if any(given) else "No API key provided"
            message = f"{fault}: send the server's as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            asks = 'Basic realm="any name, and the API key as the password"' if page else "Bearer"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": asks})
        return tenant

    def _check_page(self, bound: str, headers: _Headers) -> None:
        """Raises ApiError 403 for what only a web page of somebody else's would send."""
        hosts = [value.decode("latin-1").lower() for value in _given(headers, b"host")]
        if not all(_is_local(_name(host), bound) for host in hosts):
            message = f"this server has no API key, and so answers only to this machine's own names, not to {brief(hosts[0])}"
            raise ApiError(403, f"{message}: start it with --api-key", code="foreign_host")
        for origin in (value.decode("latin-1").lower() for value in _given(headers, b"origin")):
            if origin.partition("://")[2] not in hosts and not {"*", origin} & {*self._rules.origins}:
                message = f"web pages of {brief(origin)} may not use this server: name it in --cors-allow-origins"
                raise ApiError(403, message, code="foreign_origin")


def _context(request_id: str, headers: _Headers, first_byte: float | None) -> RequestContext:
    trace = {name.decode(): value.decode("latin-1") for name, value in headers if name in TRACE_HEADERS}
    return RequestContext(request_id, trace, time.monotonic() if first_byte is None else first_byte)


def _id_headers(path: str) -> tuple[bytes, ...]:
    """What the header with a request's id is called: Anthropic's clients look for another name than OpenAI's."""
    return (b"x-request-id", b"request-id") if path.startswith("/v1/messages") else (b"x-request-id",)


def _is_local(host: str, bound: str) -> bool:
    return host == bound.lower() or is_loopback(host)


def _name(host: str) -> str:
    """A Host header's name or address without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _given(headers: _Headers, wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name == wanted]


def _password(basic: bytes) -> bytes:
    """The password of HTTP's basic authentication, b"" if it is none."""
    try:
        return base64.b64decode(basic, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _named_tenant(headers: _Headers) -> str:
    """The tenant that the header names, "" without one; raises ApiError 400."""
    given = [value.decode("latin-1") for value in _given(headers, b"x-tenant-id")]
    if not given:
        return ""
    if len(given) == 1 and TENANT.fullmatch(given[0]):
        return given[0]
    shown = brief(", ".join(given))
    message = f"x-tenant-id must be one name of 1 to 64 letters, digits and . _ : -, got {shown}"
    raise ApiError(400, message, param="x-tenant-id")


def _request_id(headers: _Headers) -> bytes:
    """The client's own id if it is one that can be sent back and logged, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()
