"""POST /api/pull and DELETE /api/delete: Ollama's routes that change the stored models, for the operator alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from chairlift.checkpoint.downloads import delete_model
from chairlift.checkpoint.locate import pull_model
from chairlift.errors import ChairliftError
from chairlift.server.errors import ApiError
from chairlift.server.http.responses import Json, to_json_bytes
from chairlift.server.service import service_of


async def refuse(request: Request) -> Response:
    """Raises ApiError 403: clients do not change the server's models."""
    raise ApiError(403, "models are pulled and deleted only on the operator's socket (--admin-socket), or with 'chairlift pull'")


async def pull(request: Request) -> Response:
    """Downloads a model into the cache, with a line of JSON at the beginning and the end, or one object without `stream`."""
    body = await _body(request)
    config = service_of(request).default.engine.config
    work = partial(pull_model, body["model"], config.cache_dir)
    if body.get("stream") is False:
        await _call(work)
        return Json({"status": "success"})
    return StreamingResponse(_progress(body["model"], work), media_type="application/x-ndjson")


async def delete(request: Request) -> Response:
    """Deletes a downloaded model that this server does not serve."""
    model = (await _body(request))["model"]
    config = service_of(request).default.engine.config
    if any(model == served.engine.config.model for served in service_of(request).models):
        raise ApiError(409, f"{model} is being served")
    await _call(partial(delete_model, model, config.cache_dir))
    return Response(status_code=200)


async def _progress(model: str, work: Callable[[], object]) -> AsyncGenerator[bytes]:
    yield to_json_bytes({"status": f"pulling {model}"}) + b"\n"
    try:
        await asyncio.to_thread(work)
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
    try:
        body = from_json(await request.body())
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    model = body.get("model") or body.get("name") if isinstance(body, dict) else None
    if not isinstance(model, str):
        raise ApiError(400, "the body must be a JSON object with model", param="model")
    return {**body, "model": model.removesuffix(":latest")}
