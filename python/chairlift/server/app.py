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
from chairlift.server.routes.openai.openapi import OPERATIONS
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
    return [Route(operation.path, operation.handler, methods=[operation.method]) for operation in OPERATIONS]


async def _client_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody receives this response; the access log shows the status
