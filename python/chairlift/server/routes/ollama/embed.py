"""POST /api/embed and /api/embeddings: Ollama's embeddings."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.embedding import EmbeddingBatch
from chairlift.server.http.body import beside, read_fields
from chairlift.server.http.responses import Json, LargeJson, ignored_header
from chairlift.server.routes.ollama.fields import KeepAlive, keep_alive_seconds, served_name
from chairlift.server.schema.fields import Fields, GenerationRequest, texts_or_ids
from chairlift.server.service import service_of


class EmbedRequest(Fields):
    """POST /api/embed."""

    without_effect = frozenset(("options",))
    keep_alive: KeepAlive = None
    input: Any
    truncate: bool | None = None
    dimensions: int | None = None


class OldEmbedRequest(Fields):
    """POST /api/embeddings."""

    without_effect = frozenset(("options",))
    keep_alive: KeepAlive = None
    prompt: str


async def embed(request: Request) -> Response:
    """Answers one request, which without a text only loads the model. Texts that are too long are shortened, unless `truncate` is false."""
    began = time.monotonic_ns()
    body, ignored = await read_fields(request, EmbedRequest)
    is_empty = body.input in ("", [])
    inputs = [] if is_empty else await beside(request, texts_or_ids, body.input, "input")
    model = await service_of(request).use(request, served_name(body.model), keep_alive_seconds(body.keep_alive))
    if is_empty:
        return Json({"model": model.name, "embeddings": []}, headers=ignored_header(ignored))
    batch = await EmbeddingBatch.of_texts(request, _fields(body), inputs, dimensions=body.dimensions, truncate=body.truncate is not False)
    found = await batch.embeddings()
    load = round(request.state.context.waited_for_model * 1e9)

    def respond() -> LargeJson:
        embeddings = [embedding.tolist() for embedding in found]
        counts = {"prompt_eval_count": batch.generation.usage.prompt, "load_duration": load, "total_duration": time.monotonic_ns() - began}
        return LargeJson({"model": batch.generation.head["model"], "embeddings": embeddings, **counts}, headers=ignored_header(ignored))

    return await asyncio.to_thread(respond)  # many numbers take long


async def embeddings(request: Request) -> Response:
    """Answers one request with one text, which is shortened if it is too long. Without a text it only loads the model."""
    body, ignored = await read_fields(request, OldEmbedRequest)
    await service_of(request).use(request, served_name(body.model), keep_alive_seconds(body.keep_alive))
    if not body.prompt:
        return Json({"embedding": []}, headers=ignored_header(ignored))
    batch = await EmbeddingBatch.of_texts(request, _fields(body), [body.prompt], truncate=True)
    (embedding,) = await batch.embeddings()
    return Json({"embedding": embedding.tolist()}, headers=ignored_header(ignored))


def _fields(body: Fields) -> GenerationRequest:
    return GenerationRequest(model=served_name(body.model))
