"""Computes the embeddings that an API request asks for."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from starlette.requests import Request

from chairlift.engine.validation import check_dimensions, check_embeds
from chairlift.errors import ContextExceeded, InvalidRequest
from chairlift.sampling import EMBED, SamplingParams
from chairlift.server.errors import renamed_params
from chairlift.server.generation import Generation
from chairlift.server.model import ServedModel
from chairlift.server.schema.fields import REQUEST_ID, Fields, GenerationRequest, check_ids
from chairlift.server.service import service_of

MAX_INPUTS = 2048
"""OpenAI's limit of inputs in one request."""


class EmbeddingFields(Fields):
    """The fields for scheduling of a request whose texts are embedded."""

    without_effect = frozenset(("user",))
    priority: int | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None

    def generation(self) -> GenerationRequest:
        """Returns these fields."""
        names = ("model", "priority", "deadline_ms", "cache_salt", "request_id")
        return GenerationRequest(**{name: getattr(self, name) for name in names})


class EmbeddingBatch:
    """The texts of one request. Each is a sequence of its own for the scheduler."""

    def __init__(
        self, request: Request, body: GenerationRequest, texts: list[list[int]], params: SamplingParams, dimensions: int | None = None
    ) -> None:
        with renamed_params(prompt="input"):
            self.generation = Generation(request, body, texts, params, kind="list", prefix="embd-")
        self._dimensions = dimensions

    @classmethod
    async def of_texts(
        cls,
        request: Request,
        body: GenerationRequest,
        inputs: Sequence[str | list[int]],
        *,
        query: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> EmbeddingBatch:
        """Tokenizes the inputs, texts or token ids. With a `query` they are documents, and it is the first text.

        `truncate` shortens those that are too long, which otherwise raise InvalidRequest.
        """
        what, param = ("Input", "input") if query is None else ("Document", "documents")
        named = [(f"{what} {index}", param) for index in range(len(inputs))]
        if query is not None:
            named, inputs = [("The query", "query"), *named], [query, *inputs]
        model = await service_of(request).use(request, body.model, adapters=False)
        limit = check_dimensions(dimensions, model.engine.info)
        if len(inputs) > MAX_INPUTS:
            raise InvalidRequest(f"{len(inputs)} inputs in one request, at most {MAX_INPUTS} are allowed", param="input")
        texts = await _tokens(request, model, inputs, limit, must_fit=not truncate, param=param)
        for index, tokens in enumerate(texts):
            if len(tokens) <= limit:
                continue
            if not truncate:
                raise _too_long(*named[index], limit, len(tokens))
            kept = model.engine.tokenizer.num_closing_tokens if isinstance(inputs[index], str) else 0
            texts[index] = tokens[: limit - kept] + tokens[len(tokens) - kept :]
        return cls(request, body, texts, EMBED, dimensions)

    @classmethod
    async def of_pairs(
        cls, request: Request, model: ServedModel, body: GenerationRequest, query: str, documents: list[str]
    ) -> EmbeddingBatch:
        """Tokenizes pairs of a query and a document for a model that scores pairs. Raises InvalidRequest for a pair that is too long."""
        limit, group = check_embeds(model.engine.info), request.state.ticket.tenant.group
        pairs = await model.tokenizing.encode_pairs(group, model.engine.tokenizer, query, documents, limit, param="documents")
        for index, (tokens, _) in enumerate(pairs):
            if len(tokens) > limit:
                raise _too_long(f"The query with document {index}", "documents", limit, len(tokens))
        # The second text begins after the query, at one place in all pairs.
        params = replace(EMBED, second_text=pairs[0][1])
        return cls(request, body, [tokens for tokens, _ in pairs], params)

    async def embeddings(self) -> list[array[float]]:
        """Returns the embeddings in the order of the inputs: vectors of length 1. Raises the engine's errors."""
        found: dict[int, array[float]] = {}
        async with aclosing(self.generation.outputs()) as outputs:
            async for index, output in outputs:
                if output.embedding is not None:
                    found[index] = _shortened(output.embedding, self._dimensions)
        return [embedding for _, embedding in sorted(found.items())]


def _too_long(what: str, param: str, limit: int, tokens: int) -> ContextExceeded:
    message = f"This model's maximum context length is {limit} tokens for an embedding. {what} has {tokens}."
    return ContextExceeded(message, param=param, limit=limit, prompt=tokens)


async def _tokens(
    request: Request, model: ServedModel, inputs: Sequence[str | list[int]], limit: int, *, must_fit: bool, param: str
) -> list[list[int]]:
    """Returns the token ids of each input; raises InvalidRequest."""
    texts = [one for one in inputs if isinstance(one, str)]
    if len(texts) < len(inputs):
        await asyncio.to_thread(check_ids, inputs, model.engine.info, param)
    group = request.state.ticket.tenant.group
    encoded = iter(await model.tokenizing.encode(group, model.engine.tokenizer, texts, limit, must_fit=must_fit, param=param))
    return [next(encoded) if isinstance(one, str) else one for one in inputs]


def _shortened(embedding: array[float], dimensions: int | None) -> array[float]:
    """Returns the first numbers of an embedding, scaled to length 1."""
    if dimensions is None:
        return embedding
    kept = embedding[:dimensions]
    length = math.sqrt(sum(x * x for x in kept)) or 1.0
    return array("f", (x / length for x in kept))
