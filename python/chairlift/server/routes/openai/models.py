"""GET /v1/models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.http.responses import Json
from chairlift.server.service import Service, service_of, tasks


async def models(request: Request) -> Response:
    """Lists the served model and its LoRA adapters, in OpenAI's format with the fields that Anthropic's clients read."""
    service = service_of(request)
    entries = [_entry(service, name) for name in (None, *filter(service.adapter, sorted(service.engine.adapters)))]
    return Json({"object": "list", "data": entries, "first_id": entries[0]["id"], "last_id": entries[-1]["id"], "has_more": False})


async def model(request: Request) -> Response:
    """Returns the model called `name`, which may contain slashes; raises ApiError 404 for another model."""
    service = service_of(request)
    service.check_model(request.path_params["name"])
    return Json(_entry(service, service.adapter(request.path_params["name"])))


def _entry(service: Service, adapter: str | None) -> dict[str, Any]:
    """The model, or its adapter of that name."""
    facts = service.engine.facts if service.engine.ready else {}
    return {
        "id": adapter or service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "chairlift",
        "root": service.engine.adapters[adapter] if adapter else service.model,
        "parent": service.model if adapter else None,
        "max_model_len": facts.get("max_model_len"),
        **({"tasks": ["generate"] if adapter else tasks(facts)} if facts else {}),
        "type": "model",
        "display_name": adapter or service.model,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
    }
