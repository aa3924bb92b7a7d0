"""Routes for operators: index, version, metrics, and the health of the server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import chairlift
from chairlift.server.errors import unavailable
from chairlift.server.http.responses import Json
from chairlift.server.lifecycle import ModelState
from chairlift.server.model import ServedModel
from chairlift.server.service import service_of

_LINKS = {"models": "/v1/models", "openapi": "/openapi.json", "live": "/live", "ready": "/ready", "health": "/health"}
_LINKS |= {"metrics": "/metrics", "dashboard": "/dashboard"}


async def index(request: Request) -> Response:
    """Returns the server's name, version, model and links to its routes."""
    return Json({"name": "chairlift", "version": chairlift.__version__, "model": service_of(request).default.name, "links": _LINKS})


async def version(request: Request) -> Response:
    """Returns the version of chairlift."""
    return Json({"version": chairlift.__version__})


async def metrics(request: Request) -> Response:
    """Returns all metrics in Prometheus' text format."""
    text = await service_of(request).metrics_page.text(request.state.reader)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def live(request: Request) -> Response:
    """Returns 200 as long as the process responds."""
    return Json({"status": "live"})


async def ready(request: Request) -> Response:
    """Returns 200 if a request sent now would be served, else 503 with the reason. Of several models one that serves is enough."""
    service = service_of(request)
    states = [model.lifecycle.state for model in service.models]
    if ModelState.STARTING in states:
        raise service.models[states.index(ModelState.STARTING)].lifecycle.refusal()
    serving = [model for model in service.models if model.lifecycle.state in (ModelState.READY, ModelState.UNLOADED)]
    if not serving:
        raise service.default.lifecycle.refusal()
    stuck = [model.engine.stuck for model in serving if model.lifecycle.state is ModelState.READY]
    if len(stuck) == len(serving) and (stall := stuck[0]) and all(stuck):
        raise unavailable(_describe_stall(*stall), "engine_stuck", 5)
    return Json({"status": "ready"})


async def health(request: Request) -> Response:
    """Returns 200 while an engine is loaded and makes progress, even if new requests are rejected; else 503 with the reason.

    Of several models one that is healthy, or none that should be loaded, is enough: a restart of the server would end that one too.
    """
    problems = [_problem(model) for model in service_of(request).models if model.lifecycle.state not in _WITHOUT_ENGINE]
    if problems and all(problems):
        return Json({"status": "unhealthy", **(problems[0] or {})}, 503)
    return Json({"status": "healthy", **_replicas(service_of(request).models)})


def _replicas(models: Iterable[ServedModel]) -> dict[str, Any]:
    """Returns how many engines the models have and how many are ready, if a model has several."""
    counts = [(len(replicas), sum(one.state == "ready" for one in replicas)) for replicas in (model.engine.replicas for model in models)]
    several = any(total > 1 for total, _ in counts)
    return {"replicas": {"total": sum(total for total, _ in counts), "ready": sum(ready for _, ready in counts)}} if several else {}


_WITHOUT_ENGINE = (ModelState.UNLOADED, ModelState.LOADING, ModelState.LOAD_FAILED)


def _problem(model: ServedModel) -> dict[str, Any] | None:
    """Returns why a model's engine makes no progress; None if it does."""
    engine, starting = model.engine, model.lifecycle.state is ModelState.STARTING
    if not engine.alive and not starting:  # before its start, an engine of another machine is not alive either
        return {"reason": "the engine has stopped; the server's log has the reason"}
    if not engine.ready:
        return {"reason": "the model is still loading"}
    if stuck := engine.stuck:
        stage, seconds = stuck
        return {"reason": _describe_stall(stage, seconds), "stage": stage, "seconds": round(seconds, 1)}
    return None


def _describe_stall(stage: str, seconds: float) -> str:
    if stage == "process":
        return f"the engine's process has not answered for {seconds:.0f} s"
    return f"the engine has been stuck for {seconds:.0f} s at stage '{stage}'"
