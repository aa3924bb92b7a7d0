"""The admin API on a Unix socket. It needs no key, because only this user can connect to it."""

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

from chairlift.server.errors import HANDLERS
from chairlift.server.http.protocol import HttpProtocol, HttpServer
from chairlift.server.http.responses import Json
from chairlift.server.routes.ollama import manage
from chairlift.server.routes.openai import adapters
from chairlift.server.routes.ops.explain import explain
from chairlift.server.routes.ops.status import health, metrics
from chairlift.server.service import Service, service_of


class AdminApp:
    """The ASGI application of the admin socket. Its requests belong to no tenant and see all tenants' requests."""

    def __init__(self, service: Service, drain: Callable[[], None]) -> None:
        """`drain` begins the server's shutdown, as SIGTERM does."""
        self._drain = drain
        self._app = Starlette(
            routes=[
                Route("/metrics", metrics),
                Route("/health", health),
                Route("/v1/requests/{name:path}/explain", explain),
                Route("/api/pull", manage.pull, methods=["POST"]),
                Route("/api/delete", manage.delete, methods=["DELETE"]),
                Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
                Route("/state", _state),
                Route("/drain", self._begin_drain, methods=["POST"]),
            ],
            exception_handlers=HANDLERS,
        )
        self._app.state.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        scope["state"] = {"tenant": ""}
        await self._app(scope, receive, send)

    async def _begin_drain(self, request: Request) -> Response:
        self._drain()
        return Json({"status": "draining", "open": service_of(request).open}, 202)


async def _state(request: Request) -> Response:
    """Returns the engine's newest counters, the server's state, and its open and waiting requests."""
    service = service_of(request)
    http = {"open": service.admission.open, "waiting": service.admission.waiting}
    lifecycle = service.lifecycle
    return Json({**service.engine.stats(), "http": http, "state": lifecycle.state.value, "restarts": lifecycle.restarts})


@contextlib.asynccontextmanager
async def serve_admin(listener: socket.socket, admin: AdminApp) -> AsyncIterator[None]:
    """Serves the admin API on `listener` for the duration of the block."""
    # access_log=False would silence the other server's access log too.
    server = HttpServer(uvicorn.Config(admin, http=HttpProtocol, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
