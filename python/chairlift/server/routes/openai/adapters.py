"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's routes, on the operator's socket."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import InvalidRequest, InvalidSetting, OutOfMemory, UnsupportedModel
from chairlift.server.errors import ApiError
from chairlift.server.http.body import read_names
from chairlift.server.http.responses import Json
from chairlift.server.service import service_of


async def load(request: Request) -> Response:
    """Loads an adapter of a model (the body's `model`, else the first) from a directory of this machine. The model is loaded before."""
    service = service_of(request)
    body = await read_names(request, "lora_name", "lora_path")
    if not isinstance(body.get("model"), str | None):
        raise ApiError(400, "model must be a string", param="model")
    name, path = body["lora_name"], body["lora_path"]
    model = service.find(body.get("model"), adapters=False)
    if any(name in (*one.names, *one.engine.adapters) for one in service.models):
        raise ApiError(400, f"{name!r:.100} is the name of a served model", param="lora_name")
    release = await service.loader.acquire(model)
    try:
        await model.engine.load_lora_adapter(name, path)
    except (InvalidSetting, UnsupportedModel) as error:
        raise ApiError(400, str(error), param="lora_path") from None
    except OutOfMemory as error:
        raise ApiError(503, str(error)) from None
    finally:
        release()
    return Json({"status": "loaded", "lora_name": name})


async def unload(request: Request) -> Response:
    """Unloads an adapter; 409 while requests use it."""
    service = service_of(request)
    name = (await read_names(request, "lora_name"))["lora_name"]
    model = next((one for one in service.models if one.adapter(name)), None)
    if model is None:
        raise ApiError(404, f"no adapter is named {name!r:.100}", param="lora_name", code="model_not_found")
    release = await service.loader.acquire(model)
    try:
        await model.engine.unload_lora_adapter(name)
    except InvalidRequest as error:
        raise ApiError(409, str(error), param="lora_name", code=error.code) from None
    finally:
        release()
    return Json({"status": "unloaded", "lora_name": name})
