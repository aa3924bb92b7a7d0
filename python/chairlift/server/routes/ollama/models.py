"""GET /api/tags, /api/ps and /api/version, POST /api/show: Ollama's view of the served model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import chairlift
from chairlift.server.chat.reasoning import format_for_template
from chairlift.server.http.body import read_json
from chairlift.server.http.responses import Json, ignored_header
from chairlift.server.schema.fields import Fields
from chairlift.server.service import Service, service_of, tasks


class ShowRequest(Fields):
    """POST /api/show."""

    without_effect = frozenset(("verbose", "name"))


async def tags(request: Request) -> Response:
    """Lists the served model."""
    return Json({"models": [_entry(service_of(request))]})


async def ps(request: Request) -> Response:
    """Lists the loaded model, none while the engine starts."""
    service = service_of(request)
    if not service.engine.ready:
        return Json({"models": []})
    return Json({"models": [_entry(service) | {"context_length": service.engine.facts["max_model_len"]}]})


async def show(request: Request) -> Response:
    """Describes the served model; raises ApiError 404 for another model."""
    service = service_of(request)
    service.lifecycle.check_admission()
    body, ignored = ShowRequest.read(await read_json(request, queued=False))
    service.check_model(body.model and body.model.removesuffix(":latest"))
    template = service.engine.tokenizer.template_source
    names = {"generate": "completion", "embed": "embedding"}
    capabilities = [names[task] for task in tasks(service.engine.facts)]
    if template is not None:
        capabilities += ["tools"]
        capabilities += ["thinking"] if format_for_template(template) else []
    info = {"general.name": service.model, "context_length": service.engine.facts["max_model_len"]}
    entry = _entry(service)
    described = {"modified_at": entry["modified_at"], "template": template or "", "details": entry["details"]}
    return Json({**described, "model_info": info, "capabilities": capabilities}, headers=ignored_header(ignored))


async def version(request: Request) -> Response:
    """Returns the server's version."""
    return Json({"version": chairlift.__version__})


def _entry(service: Service) -> dict[str, Any]:
    modified = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    return {"name": service.model, "model": service.model, "modified_at": modified, "details": {}}
