"""The routes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import chairlift
from chairlift.config import ServerConfig
from chairlift.server.errors import HANDLERS
from chairlift.server.http.responses import Json
from chairlift.server.http.sockets import is_loopback
from chairlift.server.keys import Keys
from chairlift.server.middleware.access import PROBE_PATHS, AccessMiddleware, AccessPolicy
from chairlift.server.observability.poller import SnapshotPoller
from chairlift.server.routes.anthropic.messages import count_tokens, messages
from chairlift.server.routes.openai.chat import chat_completions
from chairlift.server.routes.openai.completions import completions
from chairlift.server.routes.openai.embeddings import embeddings
from chairlift.server.routes.openai.models import model, models
from chairlift.server.routes.openai.openapi import openapi
from chairlift.server.routes.openai.responses import responses
from chairlift.server.routes.ops.dashboard import dashboard, data
from chairlift.server.routes.ops.explain import explain
from chairlift.server.routes.ops.health import health, live, ready
from chairlift.server.routes.tokenize import detokenize, tokenize, tokenizer_info
from chairlift.server.service import Service, service_of

PROBES = ("/live", "/ready", "/health", "/ping", "/metrics", "/dashboard/data", "/state")
"""Paths that machines ask again and again."""


def build(service: Service, config: ServerConfig, keys: Keys) -> ASGIApp:
    """The server as an ASGI application, open to whom `config` and the `keys` let in."""
    app = Starlette(
        routes=routes(),
        exception_handlers={**HANDLERS, ClientDisconnect: _nobody},
    )
    app.router.redirect_slashes = False  # a redirect would lose the body
    app.state.service = service
    app.state.watch = SnapshotPoller(service)
    app.state.max_body_size = config.max_body_size
    origins = config.cors_allow_origins or ()
    guards_host = not keys and config.uds is None and is_loopback(config.host)
    # Without keys the check of the Host header guards /metrics.
    open_paths = PROBE_PATHS | ({"/metrics"} if config.public_metrics and keys else set())
    door = AccessMiddleware(app, service, AccessPolicy(keys, config.host if guards_host else None, origins, open_paths))
    if not origins:
        return door
    # Outside the door: browsers ask for leave without a key.
    exposed = ["x-request-id", "x-chairlift-ignored", "retry-after"]
    return CORSMiddleware(door, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)


def routes() -> list[Route]:
    """Every path that there is, the admin socket's apart."""
    return [
        Route("/", index),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
        Route("/openapi.json", openapi),
        Route("/v1/requests/{name:path}/explain", explain),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/live", live),
        Route("/ready", ready),
        Route("/health", health),
        Route("/ping", health),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/dashboard", dashboard),
        Route("/dashboard/data", data),
    ]


async def index(request: Request) -> Response:
    """What this server is, and where its parts are."""
    links = {name: f"/{path}" for name, path in _LINKS.items()}
    return Json({"name": "chairlift", "version": chairlift.__version__, "model": service_of(request).model, "links": links})


_LINKS = {"models": "v1/models", "openapi": "openapi.json", "live": "live", "ready": "ready", "health": "health"}
_LINKS |= {"metrics": "metrics", "dashboard": "dashboard"}


async def version(request: Request) -> Response:
    """The version of chairlift."""
    return Json({"version": chairlift.__version__})


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(service_of(request).metrics.text(request.state.tenant), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has gone: nobody reads this, but the access log shows it
