"""GET /dashboard: one page that shows the engine at work, and GET /dashboard/data, which it draws."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.errors import ApiError
from chairlift.server.http.responses import Json
from chairlift.server.observability.poller import SnapshotPoller

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


async def dashboard(request: Request) -> Response:
    """The page; nothing but its own script and style may run in it, and it may ask nobody but this server."""
    page, policy = _page()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers | {"cache-control": "no-cache"})


async def data(request: Request) -> Response:
    """What the engine does: steps after the one numbered `step`, samples after the time `sample`; a tenant is not told others' names."""
    watch: SnapshotPoller = request.app.state.watch
    try:
        step, sample = int(request.query_params.get("step", 0)), float(request.query_params.get("sample", 0))
    except ValueError:
        raise ApiError(400, "step must be a whole number, and sample a time in seconds") from None
    state = await watch.state(step, sample, request.state.tenant)
    return Json(state, headers={"cache-control": "no-store"})


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets exactly its own script and style run."""
    text = files("chairlift.server.routes.ops").joinpath("static/dashboard.html").read_text(encoding="utf-8")
    sources: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _INLINE.findall(text):
        sources[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'")
    policy = f"default-src 'none'; script-src {' '.join(sources['script'])}; style-src {' '.join(sources['style'])}; connect-src 'self'"
    return text.encode(), f"{policy}; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
