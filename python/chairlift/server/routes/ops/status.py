"""Routes for operators: index, version, metrics, and the health of the server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import chairlift
from chairlift.server.errors import unavailable
from chairlift.server.http.responses import Json
from chairlift.server.lifecycle import ServerState
from chairlift.server.service import service_of

_LINKS = {"models": "v1/models", "openapi": "openapi.json", "live": "live", "ready": "ready", "health": "health"}
_LINKS |= {"metrics": "metrics", "dashboard": "dashboard"}


async def index(request: Request) -> Response:
    """Returns the server's name, version, model and links to its routes."""
    links = {name: f"/{path}" for name, path in _LINKS.items()}
    return Json({"name": "chairlift", "version": chairlift.__version__, "model": service_of(request).model, "links": links})


async def version(request: Request) -> Response:
    """Returns the version of chairlift."""
    return Json({"version": chairlift.__version__})


async def metrics(request: Request) -> Response:
    """Returns all metrics in Prometheus' text format."""
    return Response(service_of(request).metrics.render(request.state.tenant), media_type="text/plain; version=0.0.4; charset=utf-8")


async def live(request: Request) -> Response:
    """Returns 200 as long as the process responds."""
    return Json({"status": "live"})


async def ready(request: Request) -> Response:
    """Returns 200 if a request sent now would be served, else 503 with the reason."""
    service = service_of(request)
    if service.lifecycle.state is not ServerState.READY:
        raise service.lifecycle.refusal()
    if stuck := service.engine.stuck:
        raise unavailable(_describe_stall(*stuck), "engine_stuck", 5)
    return Json({"status": "ready"})


async def health(request: Request) -> Response:
    """Returns 200 while the engine is loaded and makes progress, even if new requests are rejected; else 503 with the reason."""
    engine = service_of(request).engine
    if not engine.alive:
        return _unhealthy("the engine has stopped; the server's log has the reason")
    if not engine.ready:
        return _unhealthy("the model is still loading")
    if stuck := engine.stuck:
        stage, seconds = stuck
        return _unhealthy(_describe_stall(stage, seconds), stage=stage, seconds=round(seconds, 1))
    return Json({"status": "healthy"})


def _unhealthy(reason: str, **fields: str | float) -> Response:
    return Json({"status": "unhealthy", "reason": reason, **fields}, 503)


def _describe_stall(stage: str, seconds: float) -> str:
    if stage == "process":
        return f"the engine's process has not answered for {seconds:.0f} s"
    return f"the engine has been stuck for {seconds:.0f} s at stage '{stage}'"
