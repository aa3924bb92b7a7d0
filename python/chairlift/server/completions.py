"""POST /v1/completions: text goes on from a prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.server.answer import Json, ignored_header
from chairlift.server.body import read_json
from chairlift.server.generation import Generation
from chairlift.server.schemas import CompletionRequest
from chairlift.server.service import service_of
from chairlift.server.sse import DONE, EventStream, event, unless_gone

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, and every client's expectation."""


async def completions(request: Request) -> Response:
    """Answers one completion request, as a stream or whole."""
    service = service_of(request)
    service.admit()
    wanted, ignored = CompletionRequest.read(await read_json(request))
    service.check_model(wanted.model)
    params = wanted.params()
    scheduling = wanted.scheduling(request.state.tenant, request.headers)
    prompts = [await service.engine.encode(prompt) if isinstance(prompt, str) else prompt for prompt in wanted.prompts()]
    generation = Generation(
        service, prompts, params, scheduling, kind="text_completion", request_id=request.state.id, default=DEFAULT_MAX_TOKENS
    )
    headers = ignored_header(ignored)
    if wanted.stream:
        return EventStream(_events(generation, wanted), headers)
    return Json(await unless_gone(request.receive, _whole(generation, wanted)), headers=headers)


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


async def _whole(generation: Generation, wanted: CompletionRequest) -> dict[str, Any]:
    choices = [_choice(index, text, finish_reason) for index, (text, finish_reason) in enumerate(await generation.whole())]
    return {**generation.head, **wanted.echo(), "choices": choices, "usage": generation.usage.json()}


async def _events(generation: Generation, wanted: CompletionRequest) -> AsyncGenerator[bytes]:
    head: dict[str, Any] = generation.head | wanted.echo() | ({"usage": None} if wanted.include_usage else {})
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            if not output.text and not output.finish_reason:
                continue  # held back: half a character, or what may become a stop string
            if wanted.continuous_usage:
                head["usage"] = generation.usage.json()
            yield event({**head, "choices": [_choice(index, output.text, output.finish_reason)]})
    if wanted.include_usage:
        yield event({**head, "choices": [], "usage": generation.usage.json()})
    yield DONE
