"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's Responses API."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.chat.answer import Delta
from chairlift.errors import ContextExceeded
from chairlift.outputs import TokenLogprobs
from chairlift.server.chat.completion import ChatCompletion, prompt_of
from chairlift.server.chat.request import renamed_fields
from chairlift.server.errors import api_error, for_route
from chairlift.server.http.body import beside, read_fields
from chairlift.server.http.responses import Json, Rows, ignored_header, large_json
from chairlift.server.model import ServedModel, model_of
from chairlift.server.routes.openai.response_request import FIELD_NAMES, ResponsesRequest
from chairlift.server.schema.logprobs import chat_logprobs_json
from chairlift.server.service import service_of
from chairlift.server.streaming import EventStream, client_error, large_event, typed_event


async def responses(request: Request) -> Response:
    """Answers one request, streamed or whole."""
    body, ignored = await read_fields(request, ResponsesRequest)
    chat = await beside(request, body.chat)
    try:
        with renamed_fields(FIELD_NAMES):
            completion = await ChatCompletion.begin(request, chat, ignored, kind="response", prefix="resp_")
    except ContextExceeded as error:
        if not body.stream:
            raise
        # OpenAI says in the stream that the input is too long, and only there Codex takes it as a reason to compact the conversation.
        service = service_of(request)
        service.count_rejected("invalid", model_of(request))
        service.registry.add_refusal(request.state.tenant, request.state.context.request_id, api_error(error).refusal())
        return EventStream(_refusal(body, request, error), {})
    builder = _ResponseBuilder(body, completion, model_of(request), large=request.state.large)
    if body.stream:
        return EventStream(builder.events(), completion.headers, completion.generation.wait_headers)
    whole = await builder.whole()
    return await large_json(whole, completion.headers) if chat.logprobs or request.state.large else Json(whole, headers=completion.headers)


async def input_tokens(request: Request) -> Response:
    """Returns the number of tokens of a conversation, including the chat template's."""
    body, ignored = await read_fields(request, ResponsesRequest, queued=False)
    model, chat = await service_of(request).use(request, body.model), await beside(request, body.chat)
    with renamed_fields(FIELD_NAMES):
        tokens = await prompt_of(request, model, chat, must_fit=False)
    return Json({"object": "response.input_tokens", "input_tokens": len(tokens)}, headers=ignored_header(ignored))


_Event = dict[str, Any]


class _ResponseBuilder:
    """Builds the response from increments: reasoning, messages and function calls, and the events that report them."""

    def __init__(self, body: ResponsesRequest, completion: ChatCompletion, model: ServedModel, *, large: bool) -> None:
        """`large` says whether the request was: the response repeats its tools and instructions."""
        self._body, self._large = body, large
        self._completion = completion
        self._model = model
        self._done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        """The item in progress; its text or arguments are in `_pieces` until it is complete."""
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._has_logprobs = False
        """Whether items have log-probabilities, which may be many."""
        self._finish_reason: str | None = None

    async def whole(self) -> dict[str, Any]:
        """Returns the whole response; raises the engine's errors."""
        async with aclosing(self._completion.deltas()) as deltas:
            async for delta in deltas:
                for _ in self._take(delta):
                    pass
        *_, last = self._end()
        response: dict[str, Any] = last["response"]
        return response

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the response as server-sent events; raises errors before the first event and reports later ones as an event."""
        number = 0

        async def numbered(events: Iterable[_Event]) -> AsyncGenerator[bytes]:
            nonlocal number
            for event in events:
                data = event | {"sequence_number": number}
                number += 1
                large = (self._large and "response" in event) or (self._has_logprobs and not event["type"].endswith(".delta"))
                yield await large_event(data, typed=True) if large else typed_event(data)

        started = False
        try:
            async with aclosing(self._completion.deltas()) as deltas:
                async for delta in deltas:
                    if not started:
                        started = True
                        async for data in numbered(self._start()):
                            yield data
                    async for data in numbered(self._take(delta)):
                        yield data
            async for data in numbered(self._end()):
                yield data
        except Exception as error:
            if not started:
                raise
            failure = {"error": {"code": "server_error", "message": client_error(error).envelope["error"]["message"]}}
            async for data in numbered([{"type": "response.failed", "response": self._response("failed", **failure)}]):
                yield data

    def _start(self) -> Iterator[_Event]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response("in_progress")}

    def _take(self, delta: Delta) -> Iterator[_Event]:
        """Adds an increment and yields its events."""
        if delta.reasoning:
            if self._item is None or self._item["type"] != "reasoning":
                yield from self._close("completed")
                yield from self._open({"type": "reasoning", "id": _id("rs"), "summary": [], "content": [], "status": "in_progress"})
            self._pieces.append(delta.reasoning)
            yield {"type": "response.reasoning_text.delta", **self._item_fields(), "content_index": 0, "delta": delta.reasoning}
        if delta.content and (self._item is None or self._item["type"] != "message"):
            yield from self._close("completed")
            yield from self._open(_message())
        if (delta.content or delta.logprobs) and self._item is not None and self._item["type"] == "message":
            yield self._append_text(delta.content, delta.logprobs)
        for call in delta.calls:
            if call.id is not None:
                yield from self._close("completed")
                kind, prefix, text = ("custom_tool_call", "ctc", "input") if call.custom else ("function_call", "fc", "arguments")
                names = self._body.namespaces.get(call.name, {"name": call.name})
                head = {"type": kind, "id": _id(prefix), "call_id": call.id, **names}
                yield from self._open({**head, text: "", "status": "in_progress"})
            if call.arguments:
                self._pieces.append(call.arguments)
                name = "custom_tool_call_input" if call.custom else "function_call_arguments"
                yield {"type": f"response.{name}.delta", **self._item_fields(), "delta": call.arguments}
        if delta.finish_reason:
            self._finish_reason = delta.finish_reason

    def _end(self) -> Iterator[_Event]:
        """Yields the events after the last token; the last one has the whole response."""
        truncated = self._finish_reason == "length"
        if self._item is None or (self._item["type"] == "reasoning" and not truncated):
            yield from self._close("completed")
            yield from self._open(_message())
        yield from self._close("incomplete" if truncated else "completed")
        generation = self._completion.generation
        usage: dict[str, Any] = {"usage": generation.usage.response(), **self._completion.diagnostics()}
        usage |= generation.metrics(self._body.metrics)
        if truncated:
            details = {"incomplete_details": {"reason": "max_output_tokens"}}
            yield {"type": "response.incomplete", "response": self._response("incomplete", **details, **usage)}
        else:
            yield {"type": "response.completed", "response": self._response("completed", **usage)}

    def _open(self, item: dict[str, Any]) -> Iterator[_Event]:
        self._item, self._pieces, self._logprobs = item, [], []
        yield {"type": "response.output_item.added", "output_index": len(self._done), "item": dict(item)}
        if item["type"] in _PARTS:
            part = _PARTS[item["type"]]("", [])
            yield {"type": "response.content_part.added", **self._item_fields(), "content_index": 0, "part": part}

    def _close(self, status: str) -> Iterator[_Event]:
        """Completes the item in progress, if any."""
        if self._item is None:
            return
        item, whole = self._item, "".join(self._pieces)
        if item["type"] in _PARTS:
            place = {**self._item_fields(), "content_index": 0}
            logprobs: Rows | list[Any] = Rows(partial(self._logprobs_json, self._logprobs)) if self._logprobs else []
            item["content"] = [_PARTS[item["type"]](whole, logprobs)]
            if item["type"] == "message":
                yield {"type": "response.output_text.done", **place, "text": whole, "logprobs": logprobs}
            else:
                yield {"type": "response.reasoning_text.done", **place, "text": whole}
            yield {"type": "response.content_part.done", **place, "part": item["content"][0]}
        elif item["type"] == "custom_tool_call":
            item["input"] = whole
            yield {"type": "response.custom_tool_call_input.done", **self._item_fields(), "input": whole}
        else:
            item["arguments"] = whole
            yield {"type": "response.function_call_arguments.done", **self._item_fields(), "name": item["name"], "arguments": whole}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self._done), "item": item}
        self._done.append(item)
        self._item = None

    def _append_text(self, text: str, new_logprobs: list[TokenLogprobs] | None) -> _Event:
        self._pieces.append(text)
        logprobs = new_logprobs or []
        self._logprobs += logprobs
        self._has_logprobs = self._has_logprobs or bool(logprobs)
        shown = list(self._logprobs_json(logprobs))
        return {"type": "response.output_text.delta", **self._item_fields(), "content_index": 0, "delta": text, "logprobs": shown}

    def _logprobs_json(self, logprobs: list[TokenLogprobs]) -> Iterator[dict[str, Any]]:
        return chat_logprobs_json(self._model.engine.tokenizer, logprobs, self._body.top_logprobs or 0, False)

    def _item_fields(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._done)}

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        """Returns the response object in its current state, with the request's parameters."""
        generation = self._completion.generation
        return _response_object(
            self._body, self._model, generation.head, status, output=list(self._done), service_tier=generation.service_tier, **fields
        )


def _response_object(body: ResponsesRequest, model: ServedModel, head: Mapping[str, Any], status: str, **fields: Any) -> dict[str, Any]:
    """Returns a response object with the request's parameters, or the model's. `head` has its id, when it was created, its model's name,
    determinism and arithmetic."""
    sampling = {"temperature": 1.0, "top_p": 1.0, **model.default_sampling}
    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "determinism": head["determinism"],
        "arithmetic": head["arithmetic"],
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": head["model"],
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": None,
        "store": False,
        "temperature": sampling["temperature"] if body.temperature is None else body.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.response_tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling["top_p"] if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        **fields,
    }


async def _refusal(body: ResponsesRequest, request: Request, error: ContextExceeded) -> AsyncGenerator[bytes]:
    """Yields the events of a response that fails because its input is too long."""
    model = model_of(request)
    info = model.engine.info
    made = {"id": _id("resp"), "created": int(time.time()), "model": model.name}
    head = {**made, "determinism": info.determinism, "arithmetic": info.arithmetic}
    reason = {"code": error.code, "message": for_route(api_error(error), request.scope).envelope["error"]["message"]}
    for number, (name, status, failure) in enumerate((("created", "in_progress", None), ("failed", "failed", reason))):
        response = _response_object(body, model, head, status, error=failure)
        data = {"type": f"response.{name}", "response": response, "sequence_number": number}
        yield await large_event(data, typed=True) if request.state.large else typed_event(data)


def _message() -> dict[str, Any]:
    return {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant", "content": []}


def _text_part(text: str, logprobs: Rows | list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _reasoning_part(text: str, logprobs: Rows | list[Any]) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


_PARTS = {"message": _text_part, "reasoning": _reasoning_part}
"""Functions that make the content part of an item, by the item's type."""


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
