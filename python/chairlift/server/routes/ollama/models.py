"""GET /api/tags, /api/ps and /api/version, POST /api/show: Ollama's view of the served models."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.checkpoint.info import CheckpointInfo
from chairlift.server.http.body import read_fields
from chairlift.server.http.responses import Json, ignored_header, utc_time
from chairlift.server.model import ServedModel
from chairlift.server.routes.ollama.fields import served_name
from chairlift.server.schema.fields import Fields
from chairlift.server.service import service_of

_FOR_EVER = 100 * 365 * 86400.0
"""What Ollama's clients see as the time of a model that stays loaded, in seconds from now."""


OLLAMA_VERSION = "0.40.0"
"""The version of Ollama that clients see. Many refuse one that is older than the features they use."""


class ShowRequest(Fields):
    """POST /api/show. `name` is the older name of `model`."""

    without_effect = frozenset(("verbose",))
    name: str | None = None


async def tags(request: Request) -> Response:
    """Lists the served models under all of their names."""
    listed = [(model, name) for model in service_of(request).models for name in model.names]
    return Json({"models": [{**_entry(model, name), "size": _size(model)} for model, name in listed]})


async def ps(request: Request) -> Response:
    """Lists the loaded models, each with its bytes in memory and when it is unloaded if no request comes."""
    loader = service_of(request).loader
    listed = []
    for model in service_of(request).models:
        if not model.engine.ready:
            continue
        expires = utc_time(time.time() + min(loader.seconds_until_unload(model), _FOR_EVER))
        size = model.engine.info.num_bytes
        on_cpu = any(what == "device" and value == "cpu" for what, value, _ in model.engine.info.decisions)
        listed.append(
            {
                **_entry(model, model.name),
                "size": size,
                "size_vram": 0 if on_cpu else size,
                "context_length": model.engine.info.max_model_len,
                "expires_at": expires,
                "requests": service_of(request).describe(model, request.state.reader)["requests"],
                "load_seconds": round(model.lifecycle.start_seconds or 0.0, 3),
            }
        )
    return Json({"models": listed})


async def show(request: Request) -> Response:
    """Describes a model, which is loaded for that; raises ApiError 404 for an unknown one."""
    body, ignored = await read_fields(request, ShowRequest, queued=False)
    model = await service_of(request).use(request, served_name(body.model or body.name))
    template = model.engine.tokenizer.template_source
    names = {"generate": "completion", "embed": "embedding"}
    capabilities = [names[task] for task in model.tasks()]
    if template is not None:
        capabilities += ["tools"]
        capabilities += ["thinking"] if model.chat_model.reasoning_format is not None else []
    entry = _entry(model, model.name)
    described = {
        "license": "",
        "modelfile": f"FROM {model.name}\n",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in model.default_sampling.items()),
        "template": template or "",
        "details": entry["details"],
        "model_info": _model_info(model),
        "capabilities": capabilities,
        "modified_at": entry["modified_at"],
    }
    return Json(described, headers=ignored_header(ignored))


async def version(request: Request) -> Response:
    """Returns the version of Ollama whose API this is; Chairlift's own is at /version."""
    return Json({"version": OLLAMA_VERSION})


def _size(model: ServedModel) -> int:
    """Returns the bytes of a model's weights; before it was loaded only if they are files at a path, else 0."""
    return model.engine.info.checkpoint.weight_bytes or model.num_bytes


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    """Returns the fields of all lists. What is not known before the model was loaded is empty, and the digest is that of its source."""
    info = model.engine.info
    # `ollama list` fails without a digest.
    digest = info.digest or hashlib.sha256(model.engine.config.model.encode()).hexdigest()
    checkpoint = info.checkpoint if info.checkpoint.architecture else model.checkpoint
    family = _family(checkpoint)
    details = {
        "parent_model": "",
        "format": checkpoint.weight_format,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _parameter_size(checkpoint.num_weights),
        "quantization_level": checkpoint.weight_type,
    }
    return {"name": name, "model": name, "modified_at": utc_time(model.created), "digest": digest, "details": details}


def _model_info(model: ServedModel) -> dict[str, Any]:
    """Describes a loaded model under GGUF's names, some of which begin with the architecture."""
    info = model.engine.info
    family = _family(info.checkpoint)
    return {
        "general.architecture": family,
        "general.basename": model.name,
        "general.name": model.name,
        "general.parameter_count": info.checkpoint.num_weights,
        f"{family}.context_length": info.max_model_len,
        f"{family}.embedding_length": info.embedding_size,
    }


def _family(checkpoint: CheckpointInfo) -> str:
    """Returns the architecture in GGUF's words: `llama` for LlamaForCausalLM."""
    return checkpoint.architecture.partition("For")[0].removesuffix("Model").lower()


def _parameter_size(count: int) -> str:
    """Returns a number of parameters as Ollama shows it: `134.52M`, `8.0B`; "" for 0."""
    if count >= 10**9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.2f}M" if count else ""
