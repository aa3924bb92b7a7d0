"""POST /api/pull and DELETE /api/delete: Ollama's routes that change the stored models, for the operator alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.checkpoint.downloads import delete_model
from chairlift.checkpoint.locate import pull_model
from chairlift.checkpoint.model_name import HubName, parse_name
from chairlift.errors import ChairliftError, ModelNotFound
from chairlift.server.errors import ApiError
from chairlift.server.http.body import parse, read_json
from chairlift.server.http.responses import Json, to_json_bytes
from chairlift.server.routes.ollama.fields import served_name
from chairlift.server.service import service_of
from chairlift.server.streaming import JsonLines

_PROGRESS_SECONDS = 0.25
"""Time between two lines about a download."""


async def refuse(request: Request) -> Response:
    """Raises ApiError 403: clients do not change the server's models."""
    raise ApiError(403, "models are pulled and deleted only on the operator's socket (--admin-socket), or with 'chairlift pull'")


async def have(request: Request) -> Response:
    """Answers a client that pulls a model before it uses it: a served model is there. Raises ApiError 403 for other models."""
    body = await read_json(request, queued=False, counted=False)
    name = body.get("model") or body.get("name")
    if not isinstance(name, str) or not any(served_name(name) in model.names for model in service_of(request).models):
        return await refuse(request)
    return Json({"status": "success"})


async def pull(request: Request) -> Response:
    """Downloads a model into the cache, with lines of JSON about the progress, or one object without `stream`."""
    body = await _body(request)
    config = service_of(request).default.engine.config
    work = partial(pull_model, body["model"], config.cache_dir)
    if body.get("stream") is False:
        await _call(work)
        return Json({"status": "success"})
    return JsonLines(_progress(body["model"], work), {})


async def delete(request: Request) -> Response:
    """Deletes a downloaded model that this server does not serve."""
    model = (await _body(request))["model"]
    config = service_of(request).default.engine.config
    if any(_overlap(model, served.engine.config.model) for served in service_of(request).models):
        raise ApiError(409, f"{model} is being served")
    await _call(partial(delete_model, model, config.cache_dir))
    return Response(status_code=200)


def _overlap(model: str, served: str) -> bool:
    """Whether two names may mean the same files: a repository of the hub contains all of its models."""
    try:
        one, other = parse_name(model), parse_name(served)
    except ModelNotFound:
        return False
    if not isinstance(one, HubName) or not isinstance(other, HubName):
        return model == served
    files = {(name.tag or name.file or "").lower() for name in (one, other)}
    return one.repo == other.repo and (len(files) == 1 or "" in files)


async def _progress(model: str, work: Callable[..., object]) -> AsyncGenerator[bytes]:
    """Yields a line at the beginning and at the end, and between them how far the downloads are."""
    downloads: dict[str, tuple[int, int]] = {}
    task = asyncio.create_task(asyncio.to_thread(work, progress=lambda what, done, total: downloads.update({what: (done, total)})))
    yield to_json_bytes({"status": f"pulling {model}"}) + b"\n"
    reported: dict[str, tuple[int, int]] = {}
    while not (await asyncio.wait([task], timeout=_PROGRESS_SECONDS))[0] or reported != downloads:
        changed = {what: state for what, state in downloads.copy().items() if reported.get(what) != state}
        reported |= changed
        for what, (done, total) in changed.items():
            yield to_json_bytes({"status": f"pulling {what}", "completed": done, "total": total}) + b"\n"
    try:
        await task
    except ChairliftError as error:
        yield to_json_bytes({"error": str(error)}) + b"\n"
    else:
        yield to_json_bytes({"status": "success"}) + b"\n"


async def _call(work: Callable[[], object]) -> None:
    try:
        await asyncio.to_thread(work)
    except ChairliftError as error:
        raise ApiError(404, str(error)) from None


async def _body(request: Request) -> dict[str, Any]:
    """Returns the body with `model`, which older clients call `name`; raises ApiError."""
    body = parse(await request.body())
    model = body.get("model") or body.get("name")
    if not isinstance(model, str):
        raise ApiError(400, "the body must be a JSON object with model", param="model")
    return {**body, "model": model.removesuffix(":latest")}
