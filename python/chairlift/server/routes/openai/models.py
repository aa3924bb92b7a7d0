"""GET /v1/models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import brief
from chairlift.server.errors import ApiError
from chairlift.server.http.responses import Json, utc_time
from chairlift.server.model import ServedModel
from chairlift.server.routes.openai.files import page_of, page_size
from chairlift.server.service import service_of

MAX_PAGE = 1000
"""Most models of a page."""


async def models(request: Request) -> Response:
    """Lists the served models under all of their names, and their LoRA adapters.

    The format is OpenAI's, with the fields that Anthropic's clients read, and Anthropic's paging. Raises ApiError for a wrong query.
    """
    entries = [
        _entry(model, name)
        for model in service_of(request).models
        for name in (*model.names, *filter(model.adapter, sorted(model.engine.adapters)))
    ]
    names, query = [entry["id"] for entry in entries], request.query_params
    limit = page_size(query.get("limit"), len(entries), MAX_PAGE)
    before = "before_id" in query
    left = entries[_position(query, "after_id", names, -1) + 1 : _position(query, "before_id", names, len(names))]
    return page_of(left[-limit:] if before else left[:limit], limit < len(left))


def _position(query: Mapping[str, str], cursor: str, names: list[str], default: int) -> int:
    """Returns where a cursor of the query is in the list; raises ApiError."""
    if cursor not in query:
        return default
    if query[cursor] not in names:
        raise ApiError(400, f"{cursor} must be the id of a listed model, got {brief(query[cursor])}", param=cursor)
    return names.index(query[cursor])


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
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "capabilities": None,
        "max_input_tokens": context,
        "max_tokens": context,
        "created_at": utc_time(model.created),
    }
