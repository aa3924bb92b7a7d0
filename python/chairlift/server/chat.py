"""POST /v1/chat/completions: the assistant's next turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import InvalidRequest
from chairlift.server.answer import Json, ignored_header
from chairlift.server.body import read_json
from chairlift.server.generation import Generation
from chairlift.server.schemas import ChatRequest
from chairlift.server.service import service_of
from chairlift.server.sse import DONE, EventStream, event, unless_gone


async def chat_completions(request: Request) -> Response:
    """Answers one chat request, as a stream or whole."""
    service = service_of(request)
    service.admit()
    wanted, ignored = ChatRequest.read(await read_json(request))
    service.check_model(wanted.model)
    if wanted.tools:
        ignored.append("tools")  # the model may answer without them, and is not told of them yet
    params = wanted.params()
    scheduling = wanted.scheduling(request.state.tenant, request.headers)
    kind = "chat.completion.chunk" if wanted.stream else "chat.completion"
    try:
        prompt = await service.render(wanted.conversation())
        generation = Generation(service, [prompt], params, scheduling, kind=kind, request_id=request.state.id)
    except InvalidRequest as error:
        if error.param == "prompt":  # as the engine calls what this route takes as messages
            error.param = "messages"
        raise
    headers = ignored_header(ignored)
    if wanted.stream:
        return EventStream(_events(generation, wanted), headers)
    return Json(await unless_gone(request.receive, _whole(generation, wanted)), headers=headers)


async def _whole(generation: Generation, wanted: ChatRequest) -> dict[str, Any]:
    choices = []
    for index, (text, finish_reason) in enumerate(await generation.whole()):
        message = {"role": "assistant", "content": text, "refusal": None}
        choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason})
    return {**generation.head, **wanted.echo(), "choices": choices, "usage": generation.usage.json()}


async def _events(generation: Generation, wanted: ChatRequest) -> AsyncGenerator[bytes]:
    head: dict[str, Any] = generation.head | wanted.echo() | ({"usage": None} if wanted.include_usage else {})
    speaking: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], finish_reason: str | None) -> bytes:
        if wanted.continuous_usage:
            head["usage"] = generation.usage.json()
        return event({**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]})

    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            if index not in speaking:
                speaking.add(index)
                yield chunk(index, {"role": "assistant", "content": ""}, None)
            if output.text or output.finish_reason:  # neither: half a character, or what may become a stop string
                yield chunk(index, {"content": output.text} if output.text else {}, output.finish_reason)
    if wanted.include_usage:
        yield event({**head, "choices": [], "usage": generation.usage.json()})
    yield DONE
