"""The operator's own socket: what needs no key because only this user can reach it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from chairlift.server.app import metrics
from chairlift.server.errors import HANDLERS
from chairlift.server.http.protocol import Http, HttpServer
from chairlift.server.http.responses import Json
from chairlift.server.routes.ops.explain import explain
from chairlift.server.routes.ops.health import health
from chairlift.server.service import Service, service_of


class Admin:
    """An ASGI application without keys; its requests are nobody's, and so find everybody's."""

    def __init__(self, service: Service, drain: Callable[[], None]) -> None:
        """`drain` begins the server's end, as SIGTERM does."""
        self._drain = drain
        self._app = Starlette(
            routes=[
                Route("/metrics", metrics),
                Route("/health", health),
                Route("/v1/requests/{name:path}/explain", explain),
                Route("/state", _state),
                Route("/drain", self._begin_drain, methods=["POST"]),
            ],
            exception_handlers=HANDLERS,
        )
        self._app.state.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        scope["state"] = {"tenant": ""}
        await self._app(scope, receive, send)

    async def _begin_drain(self, request: Request) -> Response:
        self._drain()
        return Json({"status": "draining", "open": service_of(request).open}, 202)


async def _state(request: Request) -> Response:
    """The engine's newest counters, how many requests the door let in, and what the server does with them."""
    service = service_of(request)
    door = {"open": service.admission.open, "waiting": service.admission.waiting}
    lifecycle = service.lifecycle
    return Json({**service.engine.stats(), "door": door, "state": lifecycle.state.value, "restarts": lifecycle.restarts})


@contextlib.asynccontextmanager
async def serving(listener: socket.socket, admin: Admin) -> AsyncIterator[None]:
    """Serves on a Unix socket while its block lasts."""
    # Without access_log=False, which would silence the log of the other server in this process too.
    http = HttpServer(uvicorn.Config(admin, http=Http, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    task = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        yield
    finally:
        http.should_exit = True
        await task
