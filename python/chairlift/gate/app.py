"""The gate's routes: its own pages, and all other paths, which are the upstream's."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount

from chairlift.gate.gate import Gate
from chairlift.server.app import Route
from chairlift.server.http.body import read_names
from chairlift.server.http.responses import Json
from chairlift.server.routes.ops.dashboard import dashboard, data
from chairlift.server.routes.ops.explain import explain
from chairlift.server.routes.ops.status import live, metrics, ready


def gate_routes(gate: Gate) -> list[BaseRoute]:
    """The routes of a gate."""
    return [
        Route("/v1/requests/{name:path}/explain", explain),
        Route("/live", live),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/dashboard", dashboard),
        Route("/dashboard/data", data),
        Mount("/", app=gate),
    ]


def admin_routes(gate: Gate) -> list[Route]:
    """The routes of the operator on the gate's admin socket."""

    async def upstreams(request: Request) -> Response:
        return Json({"upstreams": gate.describe()})

    async def drain(request: Request, *, drained: bool) -> Response:
        gate.drain((await read_names(request, "upstream"))["upstream"], drained=drained)
        return await upstreams(request)

    return [
        Route("/upstreams", upstreams),
        Route("/upstreams/drain", partial(drain, drained=True), methods=["POST"]),
        Route("/upstreams/resume", partial(drain, drained=False), methods=["POST"]),
    ]
