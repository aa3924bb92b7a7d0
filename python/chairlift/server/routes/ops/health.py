"""What machines ask about the server: does it live, may they send requests, does the engine get on?"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.errors import unavailable
from chairlift.server.http.responses import Json
from chairlift.server.lifecycle import State
from chairlift.server.service import service_of


async def live(request: Request) -> Response:
    """200 as long as the process answers."""
    return Json({"status": "live"})


async def ready(request: Request) -> Response:
    """200 if a request sent now would be served, else 503 with the reason."""
    service = service_of(request)
    if service.lifecycle.state is not State.READY:
        raise service.lifecycle.refusal()
    if stuck := service.engine.stuck:
        raise unavailable(_words(*stuck), "engine_stuck", 5)
    return Json({"status": "ready"})


async def health(request: Request) -> Response:
    """200 while the engine has its model and gets on, even when new requests are turned away; else 503 with the reason."""
    engine = service_of(request).engine
    if not engine.alive:
        return _unhealthy("the engine has stopped; the server's log has the reason")
    if not engine.ready:
        return _unhealthy("the model is still loading")
    if stuck := engine.stuck:
        stage, seconds = stuck
        return _unhealthy(_words(stage, seconds), stage=stage, seconds=round(seconds, 1))
    return Json({"status": "healthy"})


def _unhealthy(reason: str, **more: str | float) -> Response:
    return Json({"status": "unhealthy", "reason": reason, **more}, 503)


def _words(stage: str, seconds: float) -> str:
    if stage == "process":
        return f"the engine's process has not answered for {seconds:.0f} s"
    return f"the engine has been stuck for {seconds:.0f} s at stage '{stage}'"
