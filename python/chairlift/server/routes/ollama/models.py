"""GET /api/tags, /api/ps and /api/version, POST /api/show: Ollama's view of the served models."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import chairlift
from chairlift.server.chat.reasoning import format_for_template
from chairlift.server.http.body import read_json
from chairlift.server.http.responses import Json, ignored_header
from chairlift.server.model import ServedModel
from chairlift.server.routes.ollama.fields import served_name
from chairlift.server.schema.fields import Fields
from chairlift.server.service import service_of

_FOR_EVER = 100 * 365 * 86400.0
"""What Ollama's clients see as the time of a model that stays loaded, in seconds from now."""


class ShowRequest(Fields):
    """POST /api/show."""

    without_effect = frozenset(("verbose", "name"))


async def tags(request: Request) -> Response:
    """Lists the served models under all of their names."""
    return Json({"models": [_entry(model, name) for model in service_of(request).models for name in model.names]})


async def ps(request: Request) -> Response:
    """Lists the loaded models, each with when it is unloaded if no request comes; `size` is null where it is not known."""
    loader = service_of(request).loader
    loaded = [model for model in service_of(request).models if model.engine.ready]
    listed = []
    for model in loaded:
        seconds = min(loader.seconds_until_unload(model), _FOR_EVER)
        expires = _time(time.time() + seconds)
        own = {"expires_at": expires, "requests": loader.uses(model), "load_seconds": round(model.lifecycle.start_seconds or 0.0, 3)}
        facts = {"context_length": model.engine.facts["max_model_len"], "size": model.engine.facts.get("num_bytes")}
        listed.append(_entry(model, model.name) | facts | own)
    return Json({"models": listed})


async def show(request: Request) -> Response:
    """Describes a model, which is loaded for that; raises ApiError 404 for an unknown one."""
    service = service_of(request)
    service.check_admission()
    body, ignored = ShowRequest.read(await read_json(request, queued=False))
    model = await service.use(request, served_name(body.model))
    template = model.engine.tokenizer.template_source
    names = {"generate": "completion", "embed": "embedding"}
    capabilities = [names[task] for task in model.tasks()]
    if template is not None:
        capabilities += ["tools"]
        capabilities += ["thinking"] if format_for_template(template) else []
    info = {"general.name": model.name, "context_length": model.engine.facts["max_model_len"]}
    entry = _entry(model, model.name)
    described = {"modified_at": entry["modified_at"], "template": template or "", "details": entry["details"]}
    return Json({**described, "model_info": info, "capabilities": capabilities}, headers=ignored_header(ignored))


async def version(request: Request) -> Response:
    """Returns the server's version."""
    return Json({"version": chairlift.__version__})


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    return {"name": name, "model": name, "modified_at": _time(model.created), "details": {}}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
