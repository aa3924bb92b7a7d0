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
    kind = "chat.completion.chunk" if wanted.stream else "chat.completion"
    try:
        prompt = await service.render(wanted.conversation())
        generation = Generation(service, [prompt], params, kind=kind)
    except InvalidRequest as error:
        if error.param == "prompt":  # as the engine calls what this route takes as messages
            error.param = "messages"
        raise
    headers = ignored_header(ignored)
    if wanted.stream:
        return EventStream(_events(generation, wanted), headers)
    return Json(await unless_gone(request.receive, _whole(generation)), headers=headers)


async def _whole(generation: Generation) -> dict[str, Any]:
    text: list[str] = []
    finish_reason = None
    async with aclosing(generation.outputs()) as outputs:
        async for _, output in outputs:
            text.append(output.text)
            finish_reason = output.finish_reason
    message = {"role": "assistant", "content": "".join(text), "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return {**generation.head, "choices": [choice], "usage": generation.usage.json()}


async def _events(generation: Generation, wanted: ChatRequest) -> AsyncGenerator[bytes]:
    head: dict[str, Any] = generation.head | ({"usage": None} if wanted.include_usage else {})

    def chunk(delta: dict[str, Any], finish_reason: str | None) -> bytes:
        if wanted.continuous_usage:
            head["usage"] = generation.usage.json()
        return event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]})

    yield chunk({"role": "assistant", "content": ""}, None)
    async with aclosing(generation.outputs()) as outputs:
        async for _, output in outputs:
            if output.text or output.finish_reason:  # neither: half a character, or what may become a stop string
                yield chunk({"content": output.text} if output.text else {}, output.finish_reason)
    if wanted.include_usage:
        yield event({**head, "choices": [], "usage": generation.usage.json()})
    yield DONE
