"""GET /v1/models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.http.responses import Json
from chairlift.server.model import ServedModel
from chairlift.server.service import service_of


async def models(request: Request) -> Response:
    """Lists the served models under all of their names, and their LoRA adapters.

    The format is OpenAI's, with the fields that Anthropic's clients read.
    """
    entries = [
        _entry(model, name)
        for model in service_of(request).models
        for name in (*model.names, *filter(model.adapter, sorted(model.engine.adapters)))
    ]
    return Json({"object": "list", "data": entries, "first_id": entries[0]["id"], "last_id": entries[-1]["id"], "has_more": False})


async def model(request: Request) -> Response:
    """Returns the model called `name`, which may contain slashes; raises ApiError 404 for another model."""
    name = request.path_params["name"]
    return Json(_entry(service_of(request).find(name), name))


def _computed(model: ServedModel, adapter: str | None) -> dict[str, Any]:
    """What a model that is loaded is asked for, and its arithmetic."""
    if not model.engine.ready:
        return {}
    return {"tasks": ["generate"] if adapter else model.tasks(), "arithmetic": model.engine.info.arithmetic}


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    """The model under one of its names, or its adapter of that name."""
    adapter = model.adapter(name)
    context = model.engine.info.max_model_len if model.engine.ready else None
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "chairlift",
        "root": model.engine.adapters[adapter] if adapter else model.name,
        "parent": model.name if adapter else None,
        "max_model_len": context,
        "status": model.status,
        **_computed(model, adapter),
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
    }
