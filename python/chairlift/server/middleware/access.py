"""The first stop of every request: assigns its id, checks its key, finds its tenant and counts it while it is open."""

from __future__ import annotations

import base64
import logging
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import InvalidRequest, brief
from chairlift.scheduling import TENANT
from chairlift.server.errors import ApiError, api_error, for_route, is_anthropic
from chairlift.server.http.sockets import is_loopback
from chairlift.server.keys import RESERVED_NAMES, Keys, Tenant
from chairlift.server.middleware.disconnect import run_until_disconnect
from chairlift.server.observability.request_context import CURRENT_REQUEST, FIRST_BYTE, TRACE_HEADERS, RequestContext
from chairlift.server.service import Service
from chairlift.server.session_name import session_name
from chairlift.server.work import CURRENT_WORK, WORK, Work

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")

_Headers = list[tuple[bytes, bytes]]

PROBE_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
"""Paths that never need a key: orchestrators and load balancers poll them, and the responses hold no secret."""

BASIC_AUTH_PATHS = frozenset({"/dashboard", "/dashboard/data"})
"""Paths where a browser may send the key as a password. Elsewhere browsers would attach it to requests of other sites too."""

MAX_HEADERS = 128
"""Maximum headers of one request; `http.protocol` limits their size."""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Who may use the server: API keys or, on a loopback server without keys, host names and web origins."""

    keys: Keys = field(default_factory=Keys)
    host: str | None = None
    """The bound address if the Host header must be checked: a web page can point its own name at this machine (DNS rebinding)."""
    origins: Collection[str] = ()
    """Web origins that may use the server; "*" allows any."""
    open_paths: Collection[str] = PROBE_PATHS
    """Paths that need no key."""


class AccessMiddleware:
    """ASGI middleware around the whole server. It sets `state.context`, `state.tenant`, `state.reader`, `state.ticket`,
    `state.raw_send` and `state.may_unload`: whether the client may have models unloaded that others use.

    With keys, every route except the open ones requires one. Without keys, or with a key of no tenant, the header `x-tenant-id` names the
    tenant. Only an operator's key may name a tenant that has a key of its own.
    """

    def __init__(self, app: ASGIApp, service: Service, policy: AccessPolicy) -> None:
        self._app = app
        self._service = service
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or rejects it."""
        if scope["type"] != "http":
            return
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        headers: _Headers = scope["headers"]
        request_id = _request_id(headers)
        arrival = scope.get("state", {})
        context = _context(request_id.decode(), headers, arrival.get(FIRST_BYTE))
        CURRENT_REQUEST.set(context)
        work: Work = arrival.get(WORK, Work())
        CURRENT_WORK.set(work)
        scope["state"] = {"context": context}

        # Anthropic's clients read another header than OpenAI's.
        id_headers = (b"x-request-id", b"request-id") if is_anthropic(scope) else (b"x-request-id",)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((name, request_id) for name in id_headers)]
            await send(message)

        try:
            tenant = self._tenant(scope["path"], headers)
            context.session = session_name(headers)
        except (ApiError, InvalidRequest) as error:
            await self._refuse(api_error(error), scope, receive, send_with_id)
            return
        ticket = self._service.admission.ticket(tenant)
        scope["state"] |= {"tenant": tenant.name, "reader": tenant.reader, "ticket": ticket, "raw_send": send}
        scope["state"]["may_unload"] = tenant.operator or not self._policy.keys
        waits = self._service.pacing.must_wait(tenant.paced_as)
        with self._service.track_open():
            try:
                app = partial(self._in_turn, work, waits)
                if not await run_until_disconnect(app, scope, receive, send_with_id, ahead=waits):
                    logger.debug("the client of request %s disconnected", request_id.decode())
            except ApiError as error:
                await self._refuse(error, scope, receive, send_with_id)
            except Exception:
                # The response was sent. If uvicorn saw the exception, it would close a reusable connection.
                logger.exception("request %s failed", request_id.decode())
            finally:
                ticket.release()
                self._service.registry.remove_preparing(tenant.name, context)

    async def _in_turn(self, work: Work, waits: bool, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on in its turn; raises ApiError 429 if too many wait. An operator's requests and probes never wait."""
        context, ticket, began = scope["state"]["context"], scope["state"]["ticket"], time.monotonic()
        async with self._service.pacing.turn(ticket.tenant.paced_as, work) as engine_started:
            if waits:
                context.paced = time.monotonic() - began
            ticket.on_start(engine_started)
            await self._app(scope, receive, send)

    async def _refuse(self, refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with an error. The body stays unread, so the connection cannot be reused."""
        refusal.headers["connection"] = "close"
        if refusal.rejection_reason is not None:
            self._service.count_rejected(refusal.rejection_reason)
        await for_route(refusal, scope).response()(scope, receive, send)

    def _tenant(self, path: str, headers: _Headers) -> Tenant:
        """Returns the tenant of a request; raises ApiError if it is not allowed."""
        if len(headers) > MAX_HEADERS:
            raise ApiError(431, f"the request has {len(headers)} headers, and {MAX_HEADERS} are allowed", code="too_many_headers")
        if _header_values(headers, b"content-length") and _header_values(headers, b"transfer-encoding"):
            # Two lengths of the body allow request smuggling.
            raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
        if path in self._policy.open_paths:
            return Tenant(operator=True)
        if self._policy.host is not None:
            self._check_origin(self._policy.host, headers)
        own = self._key_tenant(path, headers) if self._policy.keys else Tenant(operator=True)
        # A header that anybody can send names no tenant that has a key: neither beside its key nor instead of it.
        if own.name or not (name := _tenant_header(headers)):
            return own
        tenant = self._policy.keys.named(name)
        if tenant.has_key and not own.operator:
            return own
        return replace(tenant, operator=False)

    def _key_tenant(self, path: str, headers: _Headers) -> Tenant:
        """Returns the tenant of the request's key; raises ApiError 401."""
        page = path in BASIC_AUTH_PATHS
        keys = set(_header_values(headers, b"x-api-key"))
        for value in _header_values(headers, b"authorization"):
            scheme, _, key = value.partition(b" ")
            keys.add(key.strip() if scheme.lower() == b"bearer" else _password(key) if page else b"")
        tenant = self._policy.keys.tenant(next(iter(keys)) if len(keys) == 1 else b"")
        if tenant is None:
            # LiteLLM recognizes a wrong key by OpenAI's wording.
            fault = "Incorrect API key provided" if any(keys) else "No API key provided"
            message = f"{fault}: send the server's as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            challenge = 'Basic realm="any name, and the API key as the password"' if page else "Bearer"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": challenge})
        return tenant

    def _check_origin(self, bound: str, headers: _Headers) -> None:
        """Raises ApiError 403 for requests that only a foreign web page would send."""
        hosts = [value.decode("latin-1").lower() for value in _header_values(headers, b"host")]
        if not all(name == bound.lower() or is_loopback(name) for name in map(_host_name, hosts)):
            message = f"this server has no API key, and so answers only to this machine's own names, not to {brief(hosts[0])}"
            raise ApiError(403, f"{message}: start it with --api-key", code="foreign_host")
        for origin in (value.decode("latin-1").lower() for value in _header_values(headers, b"origin")):
            if origin.partition("://")[2] not in hosts and not {"*", origin} & {*self._policy.origins}:
                message = f"web pages of {brief(origin)} may not use this server: name it in --cors-allow-origins"
                raise ApiError(403, message, code="foreign_origin")


def _context(request_id: str, headers: _Headers, first_byte: float | None) -> RequestContext:
    trace = {name.decode(): value.decode("latin-1") for name, value in headers if name in TRACE_HEADERS}
    return RequestContext(request_id, trace, time.monotonic() if first_byte is None else first_byte)


def _host_name(host: str) -> str:
    """Returns the name or address of a Host header without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _header_values(headers: _Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def _password(basic: bytes) -> bytes:
    """Returns the password of HTTP basic authentication, b"" if it is malformed."""
    try:
        return base64.b64decode(basic, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _tenant_header(headers: _Headers) -> str:
    """Returns the tenant that the header names, "" without the header; raises ApiError 400."""
    names = [value.decode("latin-1") for value in _header_values(headers, b"x-tenant-id")]
    if not names:
        return ""
    if len(names) == 1 and TENANT.fullmatch(names[0]) and names[0] not in RESERVED_NAMES:
        return names[0]
    shown, reserved = brief(", ".join(names)), ", ".join(sorted(RESERVED_NAMES))
    message = f"x-tenant-id must be one name of 1 to 64 letters, digits and . _ : - (and not {reserved}), got {shown}"
    raise ApiError(400, message, param="x-tenant-id")


def _request_id(headers: _Headers) -> bytes:
    """Returns the client's `x-request-id` if it can be echoed and logged, else a new id."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode()
