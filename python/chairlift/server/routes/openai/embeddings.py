"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.embedding import EmbeddingBatch, EmbeddingFields
from chairlift.server.http.body import beside, read_fields
from chairlift.server.http.responses import LargeJson, ignored_header
from chairlift.server.schema.fields import IDS, TEXT, texts_or_ids


class EmbeddingRequest(EmbeddingFields):
    """OpenAI's fields, and those for scheduling."""

    input: Annotated[Any, WithJsonSchema({"anyOf": [TEXT, IDS, {"type": "array", "items": TEXT}, {"type": "array", "items": IDS}]})]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None


async def embeddings(request: Request) -> Response:
    """Answers one request."""
    body, ignored = await read_fields(request, EmbeddingRequest)
    inputs = await beside(request, texts_or_ids, body.input, "input")
    batch = await EmbeddingBatch.of_texts(request, body.generation(), inputs, dimensions=body.dimensions)
    found = await batch.embeddings()
    usage = batch.generation.usage.prompt
    encode = _base64 if body.encoding_format == "base64" else array.tolist

    def respond() -> LargeJson:
        data = [{"object": "embedding", "index": index, "embedding": encode(one)} for index, one in enumerate(found)]
        head = {**batch.generation.head, "data": data, "usage": {"prompt_tokens": usage, "total_tokens": usage}}
        return LargeJson(head, headers=ignored_header(ignored))

    return await asyncio.to_thread(respond)  # many numbers take long


def _base64(embedding: array[float]) -> str:
    """Encodes the numbers as little-endian float32."""
    if sys.byteorder == "big":
        embedding = array("f", embedding)
        embedding.byteswap()
    return base64.b64encode(embedding).decode()
