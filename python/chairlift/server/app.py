"""Builds the ASGI application: routes and middleware."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette import routing
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.server.config import ServerConfig
from chairlift.server.errors import HANDLERS
from chairlift.server.http.bodies import MAX_BODIES_BYTES, Bodies
from chairlift.server.http.sockets import is_loopback
from chairlift.server.keys import Keys
from chairlift.server.middleware.access import PROBE_PATHS, AccessMiddleware, AccessPolicy
from chairlift.server.routes import sequences
from chairlift.server.routes.anthropic.messages import count_tokens, messages
from chairlift.server.routes.ollama import chat as ollama
from chairlift.server.routes.ollama import embed as ollama_embed
from chairlift.server.routes.ollama import manage as ollama_manage
from chairlift.server.routes.ollama import models as ollama_models
from chairlift.server.routes.openai import batches, files
from chairlift.server.routes.openai.chat import chat_completions
from chairlift.server.routes.openai.completions import completions
from chairlift.server.routes.openai.embeddings import embeddings
from chairlift.server.routes.openai.models import model, models
from chairlift.server.routes.openai.openapi import openapi
from chairlift.server.routes.openai.rerank import rerank
from chairlift.server.routes.openai.responses import input_tokens, responses
from chairlift.server.routes.ops.dashboard import dashboard, data
from chairlift.server.routes.ops.explain import explain
from chairlift.server.routes.ops.status import health, index, live, metrics, ready, version
from chairlift.server.routes.sessions import close_session
from chairlift.server.routes.tokenize import detokenize, tokenize, tokenizer_info
from chairlift.server.service import Service
from chairlift.server.session_wait import HEADER as EXPECTED_WAIT

PROBES = ("/live", "/ready", "/health", "/ping", "/metrics", "/dashboard/data", "/state")
"""Paths that orchestrators and monitoring poll; they are left out of the access log."""


class Route(routing.Route):
    """A route that names its requests' tasks, for the monitor of the event loop."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if (task := asyncio.current_task()) is not None:
            task.set_name(self.path)
        await super().handle(scope, receive, send)


def guarded(app: Starlette, config: ServerConfig, keys: Keys) -> ASGIApp:
    """Puts the access checks of `config` and `keys` before an `application`."""
    origins = config.cors_allow_origins or ()
    guards_host = not keys and config.uds is None and is_loopback(config.host)
    # Without keys, the check of the Host header protects /metrics.
    open_paths = PROBE_PATHS | ({"/metrics"} if config.public_metrics and keys else set())
    middleware = AccessMiddleware(app, app.state.service, AccessPolicy(keys, config.host if guards_host else None, origins, open_paths))
    if not origins:
        return middleware
    # CORS wraps the access check: browsers send preflight requests without a key.
    exposed = ["x-request-id", "request-id", "x-chairlift-ignored", "x-chairlift-exact-history", EXPECTED_WAIT, "retry-after"]
    # Browsers ask for more than CORS before a page of the internet reaches a server in a private network.
    return CORSMiddleware(
        middleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=exposed,
    )


def application(service: Service, max_body_size: int, instead: Sequence[routing.BaseRoute] | None = None) -> Starlette:
    """Builds the application behind the access checks. It has the routes of `instead`, if given."""
    app = Starlette(
        routes=routes() if instead is None else instead,
        exception_handlers={**HANDLERS, ClientDisconnect: _client_disconnected},
    )
    app.router.redirect_slashes = False  # a redirect would lose the body
    app.state.service = service
    app.state.pollers = {}
    app.state.max_body_size = max_body_size
    app.state.bodies = Bodies(max(MAX_BODIES_BYTES, 4 * max_body_size))
    return app


def routes() -> list[Route]:
    """All routes, except those of the admin socket."""
    return [
        Route("/", index),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/sequences", sequences.open_sequence, methods=["POST"]),
        Route("/v1/sequences", sequences.list_sequences),
        Route("/v1/sequences/{id}", sequences.get_sequence),
        Route("/v1/sequences/{id}", sequences.update_sequence, methods=["PATCH"]),
        Route("/v1/sequences/{id}", sequences.delete_sequence, methods=["DELETE"]),
        Route("/v1/sequences/{id}/fork", sequences.fork, methods=["POST"]),
        Route("/v1/sequences/{id}/append", sequences.append, methods=["POST"]),
        Route("/v1/sequences/{id}/rewind", sequences.rewind, methods=["POST"]),
        Route("/v1/sequences/{id}/generate", sequences.generate, methods=["POST"]),
        Route("/close_session", close_session, methods=["POST"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/v1/rerank", rerank, methods=["POST"]),
        Route("/v2/rerank", rerank, methods=["POST"]),
        Route("/rerank", rerank, methods=["POST"]),
        Route("/v1/files", files.create_file, methods=["POST"]),
        Route("/v1/files", files.list_files),
        Route("/v1/files/{id}", files.get_file, methods=["GET"]),
        Route("/v1/files/{id}", files.delete_file, methods=["DELETE"]),
        Route("/v1/files/{id}/content", files.file_content),
        Route("/v1/batches", batches.create_batch, methods=["POST"]),
        Route("/v1/batches", batches.list_batches),
        Route("/v1/batches/{id}", batches.get_batch),
        Route("/v1/batches/{id}/cancel", batches.cancel_batch, methods=["POST"]),
        Route("/api/chat", ollama.chat, methods=["POST"]),
        Route("/api/generate", ollama.generate, methods=["POST"]),
        Route("/api/embed", ollama_embed.embed, methods=["POST"]),
        Route("/api/embeddings", ollama_embed.embeddings, methods=["POST"]),
        Route("/api/pull", ollama_manage.have, methods=["POST"]),
        Route("/api/delete", ollama_manage.refuse, methods=["DELETE"]),
        Route("/api/show", ollama_models.show, methods=["POST"]),
        Route("/api/tags", ollama_models.tags),
        Route("/api/ps", ollama_models.ps),
        Route("/api/version", ollama_models.version),
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


async def _client_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody receives this response; the access log shows the status
