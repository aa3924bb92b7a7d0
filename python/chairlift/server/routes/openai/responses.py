"""POST /v1/responses: the assistant's next turn in the form of OpenAI's Responses API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import InvalidRequest
from chairlift.outputs import TokenLogprobs
from chairlift.server.chat.completion import ChatCompletion, Delta
from chairlift.server.chat.request import renamed
from chairlift.server.http.body import read_json
from chairlift.server.http.responses import Json
from chairlift.server.routes.openai.response_request import RENAMED, ResponsesRequest
from chairlift.server.schema.logprobs import of_chat
from chairlift.server.service import service_of
from chairlift.server.streaming import EventStream, told, typed_event


async def responses(request: Request) -> Response:
    """Answers one request, as a stream or whole."""
    wanted, ignored = ResponsesRequest.read(await read_json(request))
    chat = wanted.chat()
    try:
        turn = await ChatCompletion.begin(request, chat, ignored, kind="response", prefix="resp_", stream=bool(wanted.stream))
    except InvalidRequest as error:
        raise renamed(error, RENAMED) from None
    answer = _Answer(wanted, chat.tier().get("service_tier", "default"), turn, service_of(request).engine.tokenizer)
    if wanted.stream:
        return EventStream(answer.events(), turn.headers)
    return Json(await answer.whole(), headers=turn.headers)


_Event = dict[str, Any]


class _Answer:
    """The response as it grows: messages and calls one after the other, and the events that tell of them."""

    def __init__(self, wanted: ResponsesRequest, tier: str, turn: ChatCompletion, tokenizer: Any) -> None:
        self._wanted = wanted
        self._tier = tier
        self._turn = turn
        self._tokenizer = tokenizer
        self._done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        """The item that grows; what it has of text or arguments is in `_pieces` until it is whole."""
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._finish_reason: str | None = None

    async def whole(self) -> dict[str, Any]:
        """The whole response; raises what the engine raises."""
        async with aclosing(self._turn.deltas()) as deltas:
            async for delta in deltas:
                for _ in self._take(delta):
                    pass
        *_, last = self._end()
        response: dict[str, Any] = last["response"]
        return response

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events; raises what the engine raises before it begins, and tells of what fails later."""
        number = 0

        def numbered(events: Iterable[_Event]) -> Iterator[bytes]:
            nonlocal number
            for event in events:
                yield typed_event(event | {"sequence_number": number})
                number += 1

        begun = False
        try:
            async with aclosing(self._turn.deltas()) as deltas:
                async for delta in deltas:
                    if not begun:
                        begun = True
                        for data in numbered(self._beginning()):
                            yield data
                    for data in numbered(self._take(delta)):
                        yield data
            for data in numbered(self._end()):
                yield data
        except Exception as error:
            if not begun:
                raise
            failure = {"error": {"code": "server_error", "message": told(error).envelope["error"]["message"]}}
            for data in numbered([{"type": "response.failed", "response": self._response("failed", **failure)}]):
                yield data

    def _beginning(self) -> Iterator[_Event]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response("in_progress")}

    def _take(self, delta: Delta) -> Iterator[_Event]:
        """Adds what is new."""
        if delta.content and (self._item is None or self._item["type"] != "message"):
            yield from self._close("completed")
            yield from self._open(_message())
        if (delta.content or delta.logprobs) and self._item is not None and self._item["type"] == "message":
            yield self._more_text(delta.content, delta.logprobs)
        for call in delta.calls:
            if call.id is not None:
                yield from self._close("completed")
                head = {"type": "function_call", "id": _id("fc"), "call_id": call.id, "name": call.name}
                yield from self._open({**head, "arguments": "", "status": "in_progress"})
            if call.arguments:
                self._pieces.append(call.arguments)
                yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": call.arguments}
        if delta.finish_reason:
            self._finish_reason = delta.finish_reason

    def _end(self) -> Iterator[_Event]:
        """The events after the last token, of which the last one has the whole response."""
        if self._item is None:
            yield from self._open(_message())
        cut = self._finish_reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        usage: dict[str, Any] = {"usage": self._turn.generation.usage.response()}
        if self._wanted.metrics:
            usage |= self._turn.generation.metrics()
        if cut:
            details = {"incomplete_details": {"reason": "max_output_tokens"}}
            yield {"type": "response.incomplete", "response": self._response("incomplete", **details, **usage)}
        else:
            yield {"type": "response.completed", "response": self._response("completed", **usage)}

    def _open(self, item: dict[str, Any]) -> Iterator[_Event]:
        self._item, self._pieces, self._logprobs = item, [], []
        yield {"type": "response.output_item.added", "output_index": len(self._done), "item": dict(item)}
        if item["type"] == "message":
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": _part("", [])}

    def _close(self, status: str) -> Iterator[_Event]:
        """Ends the item that grows, if there is one."""
        if self._item is None:
            return
        item, whole = self._item, "".join(self._pieces)
        if item["type"] == "message":
            place = {**self._place(), "content_index": 0}
            item["content"] = [_part(whole, self._logprobs)]
            yield {"type": "response.output_text.done", **place, "text": whole, "logprobs": self._logprobs}
            yield {"type": "response.content_part.done", **place, "part": item["content"][0]}
        else:
            item["arguments"] = whole
            yield {"type": "response.function_call_arguments.done", **self._place(), "name": item["name"], "arguments": whole}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self._done), "item": item}
        self._done.append(item)
        self._item = None

    def _more_text(self, text: str, found: list[TokenLogprobs] | None) -> _Event:
        self._pieces.append(text)
        logprobs = of_chat(self._tokenizer, found, self._wanted.top_logprobs or 0, False) if found else []
        self._logprobs += logprobs
        return {"type": "response.output_text.delta", **self._place(), "content_index": 0, "delta": text, "logprobs": logprobs}

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._done)}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        """The response object as it is now; it repeats what the client asked for."""
        wanted, head = self._wanted, self._turn.generation.head
        return {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "determinism": head["determinism"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": wanted.instructions,
            "max_output_tokens": wanted.max_output_tokens,
            "metadata": wanted.metadata or {},
            "model": head["model"],
            "output": list(self._done),
            "parallel_tool_calls": wanted.parallel_tool_calls is not False,
            "previous_response_id": None,
            "service_tier": self._tier,
            "store": False,
            "temperature": 1.0 if wanted.temperature is None else wanted.temperature,
            "text": {"format": (wanted.text and wanted.text.format) or {"type": "text"}},
            "tool_choice": "auto" if wanted.tool_choice is None else wanted.tool_choice,
            "tools": [tool.model_dump() for tool in wanted.tools or ()],
            "top_logprobs": wanted.top_logprobs or 0,
            "top_p": 1.0 if wanted.top_p is None else wanted.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }


def _message() -> dict[str, Any]:
    return {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant", "content": []}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
