"""The gate's routes: its own pages, and all other paths, which are the upstream's."""

from __future__ import annotations

from starlette.routing import BaseRoute, Mount

from chairlift.gate.gate import Gate
from chairlift.server.app import Route
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
