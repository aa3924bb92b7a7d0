"""GET /dashboard: a page that shows the engine's state, and GET /dashboard/data, which the page polls."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import brief
from chairlift.server.errors import ApiError
from chairlift.server.http.responses import Json
from chairlift.server.model import ServedModel
from chairlift.server.observability.poller import SnapshotPoller
from chairlift.server.service import service_of
from chairlift.timeline import STATES

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

_STATES_PLACEHOLDER = "/* timeline states */ {}"
"""The page's script has this where the table of `chairlift.timeline.STATES` belongs."""


async def dashboard(request: Request) -> Response:
    """Returns the page. It may run only its own script and style, and connect only to this server."""
    page, policy = _page()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers | {"cache-control": "no-cache"})


async def data(request: Request) -> Response:
    """Returns an engine's state (of `model` and `replica`, else the first), steps after number `step` and samples after time `sample`."""
    service = service_of(request)
    poller = _poller(request, service.find(request.query_params.get("model")))
    try:
        step, sample = int(request.query_params.get("step", 0)), float(request.query_params.get("sample", 0))
    except ValueError:
        raise ApiError(400, "step must be a whole number, and sample a time in seconds") from None
    reader = request.state.reader
    state = await poller.state(step, sample, reader)
    models = [service.describe(model, reader) for model in service.models]
    # The report has figures of all tenants.
    shadow = service.shadow.report if service.shadow is not None and reader is None else None
    return Json({**state, "models": models, "shadow": shadow}, headers={"cache-control": "no-store"})


def _poller(request: Request, model: ServedModel) -> SnapshotPoller:
    """Returns the poller of the engine that the request asks for. Raises ApiError 404."""
    wanted, replicas = request.query_params.get("replica"), model.engine.replicas
    replica = next((one for one in replicas if wanted in (None, str(one.number))), None)
    if replica is None:
        numbers = ", ".join(str(one.number) for one in replicas)
        raise ApiError(404, f"there is no engine {brief(wanted)}; {model.name} has {numbers or 'none'}", param="replica")
    pollers: dict[tuple[str, int], SnapshotPoller] = request.app.state.pollers
    key = model.name, replica.number
    if key not in pollers or pollers[key].replica is not replica:
        pollers[key] = SnapshotPoller(model, replica)
    return pollers[key]


@cache
def _page() -> tuple[bytes, str]:
    """Returns the page, and a content security policy that allows exactly its script and style."""
    text = (Path(__file__).parent / "static/dashboard.html").read_text(encoding="utf-8")
    text = text.replace(_STATES_PLACEHOLDER, json.dumps({name: asdict(state) for name, state in STATES.items()}), 1)
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _INLINE.findall(text):
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'")
    policy = f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; connect-src 'self'"
    return text.encode(), f"{policy}; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
