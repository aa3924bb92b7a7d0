"""POST /api/chat and /api/generate: Ollama's chat and completion."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.chat.answer import Delta, WholeCalls
from chairlift.chat.tools.json_text import parsed_object
from chairlift.server.chat.completion import ChatCompletion
from chairlift.server.chat.request import renamed_fields
from chairlift.server.http.body import beside, read_fields
from chairlift.server.http.responses import Json, large_json, to_json_bytes, utc_time
from chairlift.server.routes.ollama.chat_request import FIELD_NAMES, GenerateRequest, OllamaChatRequest
from chairlift.server.routes.ollama.fields import keep_alive_seconds
from chairlift.server.schema.logprobs import chat_logprobs_json
from chairlift.server.service import service_of
from chairlift.server.streaming import JsonLines


async def chat(request: Request) -> Response:
    """Answers one conversation, streamed or whole."""
    body, ignored = await read_fields(request, OllamaChatRequest)
    return await _answer(request, body, ignored, as_message=True)


async def generate(request: Request) -> Response:
    """Answers one prompt, streamed or whole."""
    body, ignored = await read_fields(request, GenerateRequest)
    return await _answer(request, body, ignored, as_message=False)


async def _answer(request: Request, body: OllamaChatRequest | GenerateRequest, ignored: list[str], *, as_message: bool) -> Response:
    service, keep_alive = service_of(request), keep_alive_seconds(body.keep_alive)
    unloads = body.empty and keep_alive == 0
    model = service.find(body.served) if unloads else await service.use(request, body.served, keep_alive)
    if body.empty:  # clients load and unload a model in this way
        reason = "unload" if unloads and service.let_unload(request, model) else "load"
        return Json(
            {"model": model.name, "created_at": utc_time(time.time()), **_text("", "", as_message), "done": True, "done_reason": reason}
        )
    converted, without_effect = await beside(request, body.chat)
    if body.think and (body.raw_prompt is not None or model.chat_model.reasoning_format is None):
        without_effect.append("think")
    with renamed_fields(FIELD_NAMES):
        completion, _ = await ChatCompletion.begin_within_context(
            request, converted, [*ignored, *without_effect], kind="chat", prefix="ollama-", raw_prompt=body.raw_prompt
        )
    loading = request.state.context.waited_for_model
    answer = _Answer(completion, converted.top_logprobs or 0, model.engine.tokenizer, loading, as_message=as_message)
    if converted.stream:
        return JsonLines(answer.lines(), completion.headers, completion.generation.wait_headers)
    whole = await answer.whole()
    return await large_json(whole, completion.headers) if converted.logprobs else Json(whole, headers=completion.headers)


class _Answer:
    """Builds the answer's parts from increments. A call is sent as a whole when it has ended."""

    def __init__(self, completion: ChatCompletion, num_top: int, tokenizer: Any, loading: float, *, as_message: bool) -> None:
        """`loading` are the seconds until the model was loaded."""
        self._completion = completion
        self._loading = loading
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._as_message = as_message
        self._calls = WholeCalls()
        self._done_reason = "stop"

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yields the answer as lines of JSON."""
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                yield to_json_bytes(part) + b"\n"

    async def whole(self) -> dict[str, Any]:
        """Returns the whole answer."""
        content, thinking = [], []
        calls: list[Any] = []
        logprobs: list[Any] = []
        last: dict[str, Any] = {}
        async with aclosing(self._parts()) as parts:
            async for last in parts:
                message = last["message"] if self._as_message else last
                content.append(message["content" if self._as_message else "response"])
                thinking.append(message.get("thinking", ""))
                calls += message.get("tool_calls", ())
                logprobs += last.get("logprobs", ())
        text = _text("".join(content), "".join(thinking), self._as_message)
        if calls:
            text["message"]["tool_calls"] = calls
        return {**last, **text, **({"logprobs": logprobs} if logprobs else {})}

    async def _parts(self) -> AsyncGenerator[dict[str, Any]]:
        async with aclosing(self._completion.deltas()) as deltas:
            async for delta in deltas:
                for part in self._take(delta):
                    yield self._head() | part | {"done": False}
        usage = self._completion.generation.usage
        durations = _durations(self._completion.generation.metrics(True).get("metrics", {}), self._loading)
        end = {"done": True, "done_reason": self._done_reason, **durations}
        counts = {"prompt_eval_count": usage.prompt, "eval_count": usage.completion}
        yield self._head() | _text("", "", self._as_message) | end | counts

    def _take(self, delta: Delta) -> list[dict[str, Any]]:
        """Adds an increment; returns its parts."""
        parts: list[dict[str, Any]] = []
        if delta.content or delta.reasoning or delta.logprobs:
            part = _text(delta.content, delta.reasoning, self._as_message)
            if delta.logprobs:
                part["logprobs"] = list(chat_logprobs_json(self._tokenizer, delta.logprobs, self._num_top, False))
            parts.append(part)
        for call in self._calls.push(delta):
            function = {"index": call.index, "name": call.name, "arguments": parsed_object(call.arguments)}
            parts.append({"message": {"role": "assistant", "content": "", "tool_calls": [{"id": call.id, "function": function}]}})
        if delta.finish_reason:
            self._done_reason = "length" if delta.finish_reason == "length" else "stop"
        return parts

    def _head(self) -> dict[str, Any]:
        return {"model": self._completion.generation.head["model"], "created_at": utc_time(time.time())}


def _text(content: str, thinking: str, as_message: bool) -> dict[str, Any]:
    fields = {"thinking": thinking} if thinking else {}
    return {"message": {"role": "assistant", "content": content, **fields}} if as_message else {"response": content, **fields}


def _durations(metrics: Mapping[str, float | None], loading: float) -> dict[str, int]:
    """Returns Ollama's durations, in nanoseconds."""
    load = round(loading * 1e9)
    first, queued, generation = (
        int((metrics.get(name) or 0.0) * 1e6) for name in ("time_to_first_token_ms", "queue_time_ms", "generation_time_ms")
    )
    return {
        "total_duration": first + generation,
        "load_duration": load,
        "prompt_eval_duration": max(0, first - queued - load),
        "eval_duration": generation,
    }
