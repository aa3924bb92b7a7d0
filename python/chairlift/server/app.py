"""The routes."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import chairlift
from chairlift.server.answer import Json
from chairlift.server.chat import chat_completions
from chairlift.server.completions import completions
from chairlift.server.door import Door, read_keys
from chairlift.server.errors import HANDLERS
from chairlift.server.explain import explain
from chairlift.server.service import Service, service_of
from chairlift.server.sse import ClientGone

PROBES = ("/live", "/ready", "/health", "/ping", "/metrics")
"""Paths that machines ask again and again."""


def build(service: Service, api_key: str | None = None) -> ASGIApp:
    """The server as an ASGI application; with a key, or several named ones, every route but /live wants one. Raises InvalidSetting."""
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/requests/{name:path}/explain", explain),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/live", live),
            Route("/ready", ready),
            Route("/health", health),
            Route("/ping", health),
            Route("/version", version),
            Route("/metrics", metrics),
        ],
        exception_handlers={**HANDLERS, ClientGone: _nobody, ClientDisconnect: _nobody},
    )
    app.router.redirect_slashes = False  # a redirect would lose the body
    app.state.service = service
    return Door(app, service, read_keys(api_key))


async def models(request: Request) -> Response:
    """Lists the one model."""
    return Json({"object": "list", "data": [_model(service_of(request))]})


async def model(request: Request) -> Response:
    """Describes the model, if it is the one asked for; names with slashes are names too."""
    service = service_of(request)
    service.check_model(request.path_params["name"])
    return Json(_model(service))


def _model(service: Service) -> dict[str, Any]:
    facts = service.engine.facts if service.engine.ready else {}
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "chairlift",
        "max_model_len": facts.get("max_model_len"),
    }


async def live(request: Request) -> Response:
    """200 as long as the process answers."""
    return Json({"status": "live"})


async def ready(request: Request) -> Response:
    """200 if a request sent now would be served, else 503 with the reason."""
    service_of(request).admit()
    return Json({"status": "ready"})


async def health(request: Request) -> Response:
    """200 while the engine lives and has its model, even when new requests are turned away."""
    engine = service_of(request).engine
    healthy = engine.alive and engine.ready
    return Json({"status": "healthy" if healthy else "unhealthy"}, 200 if healthy else 503)


async def version(request: Request) -> Response:
    """The version of chairlift."""
    return Json({"version": chairlift.__version__})


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has gone: nobody reads this, but the access log shows it
