"""GET /v1/models, and POST /v1/embeddings, which a model that generates text rejects."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import InvalidRequest
from chairlift.server.http.responses import Json
from chairlift.server.service import Service, service_of


async def models(request: Request) -> Response:
    """Lists the served model, in OpenAI's format with the fields that Anthropic's clients read."""
    entry = _entry(service_of(request))
    return Json({"object": "list", "data": [entry], "first_id": entry["id"], "last_id": entry["id"], "has_more": False})


async def model(request: Request) -> Response:
    """Returns the model called `name`, which may contain slashes; raises ApiError 404 for another model."""
    service = service_of(request)
    service.check_model(request.path_params["name"])
    return Json(_entry(service))


async def embeddings(request: Request) -> Response:
    """Raises InvalidRequest: the model generates text."""
    model = service_of(request).model
    raise InvalidRequest(
        f"{model!r} generates text and gives no embeddings: send this to a server that has an embedding model",
        param="model",
        code="unsupported",
    )


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
        "type": "model",
        "display_name": service.model,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
    }
