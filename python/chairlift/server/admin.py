"""The admin API on a Unix socket. It needs no key, because only this user can connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from chairlift.server.errors import HANDLERS
from chairlift.server.http.body import read_names
from chairlift.server.http.protocol import HttpProtocol, HttpServer
from chairlift.server.http.responses import Json
from chairlift.server.model import ServedModel
from chairlift.server.routes.ollama import manage
from chairlift.server.routes.openai import adapters
from chairlift.server.routes.ops.explain import explain
from chairlift.server.routes.ops.status import health, metrics
from chairlift.server.service import Service, service_of

if TYPE_CHECKING:
    from chairlift.server.model_loader import ModelLoader


class AdminApp:
    """The ASGI application of the admin socket. Its requests belong to no tenant and are the operator's."""

    def __init__(self, service: Service, drain: Callable[[], None], drain_seconds: float, more: Sequence[Route] = ()) -> None:
        """`drain` begins the server's shutdown, as SIGTERM does. An engine's requests get `drain_seconds` to end before it is restarted.

        `more` are routes beside those that all servers have.
        """
        self._drain, self._drain_seconds = drain, drain_seconds
        self._app = Starlette(routes=[*self.routes(), *more], exception_handlers=HANDLERS)
        self._app.state.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        scope["state"] = {"tenant": "", "reader": None}
        await self._app(scope, receive, send)

    def routes(self) -> list[Route]:
        """The routes that all servers have on the socket."""
        return [
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/v1/requests/{name:path}/explain", explain),
            Route("/api/pull", manage.pull, methods=["POST"]),
            Route("/api/delete", manage.delete, methods=["DELETE"]),
            Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
            Route("/state", _state),
            Route("/models", _models),
            Route("/models/load", _changing("Begins to load a model.", lambda loader, model: loader.load(model)), methods=["POST"]),
            Route(
                "/models/unload",
                _changing("Unloads a model, when the requests that need it have ended.", lambda loader, model: loader.unload(model)),
                methods=["POST"],
            ),
            Route(
                "/models/restart",
                _changing(
                    "Begins to restart a model's engines one after the other.",
                    lambda loader, model: loader.keeper(model).restart(self._drain_seconds),
                ),
                methods=["POST"],
            ),
            Route("/drain", self._begin_drain, methods=["POST"]),
        ]

    async def _begin_drain(self, request: Request) -> Response:
        self._drain()
        return Json({"status": "draining", "open": service_of(request).open}, 202)


async def _state(request: Request) -> Response:
    """Returns the newest counters of a model's engine (`?model=`, else the first), its state, and the open and waiting requests."""
    service = service_of(request)
    http = {"open": service.admission.open, "waiting": service.admission.waiting}
    model = service.find(request.query_params.get("model"))
    lifecycle = model.lifecycle
    return Json({**model.engine.stats().pack(), "http": http, "state": lifecycle.state.value, "restarts": lifecycle.restarts})


async def _models(request: Request) -> Response:
    """Lists the models with their states and the requests that need them."""
    return Json({"models": [_described(service_of(request), model) for model in service_of(request).models]})


def _changing(purpose: str, change: Callable[[ModelLoader, ServedModel], None]) -> Callable[[Request], Awaitable[Response]]:
    """Returns a route with this docstring that begins a change of the model in the body, and describes that model."""

    async def route(request: Request) -> Response:
        service = service_of(request)
        model = service.find((await read_names(request, "model"))["model"])
        change(service.loader, model)
        return Json(_described(service, model), 202)

    route.__doc__ = purpose
    return route


def _described(service: Service, model: ServedModel) -> dict[str, object]:
    replicas = [
        {"number": one.number, "state": one.state, "restarts": one.restarts, "sequences": one.engine.open_sequences}
        for one in model.engine.replicas
    ]
    return {**service.describe(model), "restarts": model.lifecycle.restarts, "replicas": replicas}


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
