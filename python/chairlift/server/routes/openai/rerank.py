"""POST /v1/rerank, /v2/rerank and /rerank: orders documents by their similarity to a query, as in Jina's and Cohere's APIs."""

from __future__ import annotations

import asyncio
from operator import mul
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from chairlift.engine.validation import relevance
from chairlift.errors import InvalidRequest
from chairlift.server.embedding import MAX_INPUTS, EmbeddingBatch, EmbeddingFields
from chairlift.server.http.body import read_fields
from chairlift.server.http.responses import Json, ignored_header
from chairlift.server.schema.fields import TEXT
from chairlift.server.service import service_of

DOCUMENT = {"anyOf": [TEXT, {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}]}


class RerankRequest(EmbeddingFields):
    """Jina's and Cohere's fields, and those for scheduling."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[Any, WithJsonSchema({"type": "array", "items": DOCUMENT, "minItems": 1, "maxItems": MAX_INPUTS - 1})]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """Returns the documents' texts. Raises InvalidRequest."""
        documents = self.documents
        if not isinstance(documents, list) or not 0 < len(documents) < MAX_INPUTS:
            raise InvalidRequest(f"documents must be a list of 1 to {MAX_INPUTS - 1} texts", param="documents")
        texts: list[str] = []
        for index, one in enumerate(documents):
            text = one.get("text") if isinstance(one, dict) else one
            if not isinstance(text, str) or not text:
                message = f'document {index} must be a text that is not empty, or {{"text": ...}}'
                raise InvalidRequest(message, param="documents")
            texts.append(text)
        return texts


async def rerank(request: Request) -> Response:
    """Answers one request.

    A document's score is that of a classifier of pairs of texts; with a model of embeddings, the cosine of its embedding and the query's.
    """
    body, ignored = await read_fields(request, RerankRequest)
    texts = body.texts()
    model = await service_of(request).use(request, body.model, adapters=False)
    kind = model.engine.info.score
    if kind is None:
        batch = await EmbeddingBatch.of_texts(request, body.generation(), texts, query=body.query)
    else:
        batch = await EmbeddingBatch.of_pairs(request, model, body.generation(), body.query, texts)
    embeddings = await batch.embeddings()

    def respond() -> Json:
        if kind is None:
            scores = [sum(map(mul, embeddings[0], document)) for document in embeddings[1:]]
        else:
            scores = [relevance(number, kind) for (number,) in embeddings]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        usage = batch.generation.usage.prompt
        head = {**batch.generation.head, "results": results, "usage": {"prompt_tokens": usage, "total_tokens": usage}}
        return Json(head, headers=ignored_header(ignored))

    return await asyncio.to_thread(respond)  # many numbers take long
