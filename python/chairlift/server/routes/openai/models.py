"""GET /v1/models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.http.responses import Json
from chairlift.server.service import Service, service_of, tasks


async def models(request: Request) -> Response:
    """Lists the served model, in OpenAI's format with the fields that Anthropic's clients read."""
    entry = _entry(service_of(request))
    return Json({"object": "list", "data": [entry], "first_id": entry["id"], "last_id": entry["id"], "has_more": False})


async def model(request: Request) -> Response:
    """Returns the model called `name`, which may contain slashes; raises ApiError 404 for another model."""
    service = service_of(request)
    service.check_model(request.path_params["name"])
    return Json(_entry(service))


def _entry(service: Service) -> dict[str, Any]:
    facts = service.engine.facts if service.engine.ready else {}
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "chairlift",
        "root": service.model,
        "parent": None,
        "max_model_len": facts.get("max_model_len"),
        **({"tasks": tasks(facts)} if facts else {}),
        "type": "model",
        "display_name": service.model,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
    }
