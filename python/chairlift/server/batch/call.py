"""Sends one request to the server's own application, as a client would over HTTP."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from chairlift.scheduling import BACKGROUND
from chairlift.server.admission import Admission
from chairlift.server.errors import ApiError
from chairlift.server.http.responses import to_json_bytes
from chairlift.server.keys import Tenant
from chairlift.server.observability.request_context import CURRENT_REQUEST, RequestContext
from chairlift.server.registry import RequestRegistry

_OVERLOADED = ("queue_full", "overloaded")


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response."""

    status: int
    request_id: str
    body: bytes
    retry_after: int = 0
    """Seconds after which the server wants to be asked again."""

    @property
    def overloaded(self) -> bool:
        """Whether the server had too many requests, so that nothing is known about this one."""
        return self.status == 503 and json.loads(self.body)["error"]["code"] in _OVERLOADED


async def call(
    app: ASGIApp,
    admission: Admission,
    registry: RequestRegistry,
    tenant: Tenant,
    url: str,
    body: dict[str, Any],
    engine_started: Callable[[], None],
) -> Reply:
    """Posts `body` for `tenant` as a background request and returns the response.

    `admission` counts the background's requests, and `registry` knows them. `engine_started` is called when an engine starts the request.
    The caller handles exceptions of the application.
    """
    context = RequestContext(uuid.uuid4().hex)
    if body.get("stream"):
        refusal = ApiError(400, "a request of a batch cannot be streamed: leave out stream", param="stream")
        return Reply(refusal.status, context.request_id, to_json_bytes(refusal.envelope))
    CURRENT_REQUEST.set(context)
    pending = [await asyncio.to_thread(to_json_bytes, body | {"priority": BACKGROUND})]  # it may have megabytes
    parts: list[bytes] = []
    status, retry_after = 500, 0

    async def receive() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client never disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, retry_after
        if message["type"] == "http.response.start":
            status, retry_after = message["status"], int(dict(message.get("headers", ())).get(b"retry-after", 0))
        else:
            parts.append(message.get("body", b""))

    ticket = admission.ticket(tenant)
    ticket.on_start(engine_started)
    state = {"context": context, "tenant": tenant.name, "reader": tenant.name, "ticket": ticket, "raw_send": send}
    try:
        await app(_scope(url, state), receive, send)
    finally:
        ticket.release()
        registry.remove_preparing(tenant.name, context)  # the engine has not got one that was refused
    return Reply(status, context.request_id, b"".join(parts), retry_after)


def _scope(url: str, state: dict[str, Any]) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": state,
    }
