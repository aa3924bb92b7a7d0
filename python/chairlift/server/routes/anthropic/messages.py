"""POST /v1/messages and /v1/messages/count_tokens: the assistant's next turn in the form of Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from chairlift.errors import InvalidRequest
from chairlift.server.chat.completion import ChatCompletion, Delta, prompt_of
from chairlift.server.chat.request import renamed
from chairlift.server.http.body import read_json
from chairlift.server.http.responses import Json, ignored_header
from chairlift.server.routes.anthropic.message_request import RENAMED, CountRequest, MessagesRequest
from chairlift.server.service import service_of
from chairlift.server.streaming import EventStream, typed_event


async def messages(request: Request) -> Response:
    """Answers one request, as a stream or whole."""
    wanted, ignored = MessagesRequest.read(await read_json(request))
    chat = wanted.chat()
    try:
        turn = await ChatCompletion.begin(request, chat, ignored, kind="message", prefix="msg_", stream=bool(wanted.stream))
    except InvalidRequest as error:
        raise renamed(error, RENAMED) from None
    answer = _Answer(wanted, turn)
    if wanted.stream:
        return EventStream(answer.events(), turn.headers)
    return Json(await answer.whole(), headers=turn.headers)


async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation has, with what the chat template adds."""
    service = service_of(request)
    service.lifecycle.check_admission()
    wanted, ignored = CountRequest.read(await read_json(request, queued=False))
    service.check_model(wanted.model)
    tokens = await prompt_of(service, wanted.chat())
    return Json({"input_tokens": len(tokens)}, headers=ignored_header(ignored))


class _Answer:
    """The message as it grows: texts and calls one after the other, and the events that tell of them."""

    def __init__(self, wanted: MessagesRequest, turn: ChatCompletion) -> None:
        self._wanted = wanted
        self._turn = turn
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] | None = None
        """The text or arguments of the last block, while it grows."""
        self._reason: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    async def whole(self) -> dict[str, Any]:
        """The whole message; raises what the engine raises."""
        async with aclosing(self._turn.deltas()) as deltas:
            async for delta in deltas:
                for _ in self._take(delta):
                    pass
        for _ in self._end():
            pass
        metrics = self._turn.generation.metrics() if self._wanted.metrics else {}
        return self._message() | {"content": self._blocks, **self._reason, **metrics}

    async def events(self) -> AsyncGenerator[bytes]:
        """The message as server-sent events; raises what the engine raises."""
        begun = False
        async with aclosing(self._turn.deltas()) as deltas:
            async for delta in deltas:
                if not begun:
                    begun = True
                    yield typed_event({"type": "message_start", "message": self._message()})
                    yield typed_event({"type": "ping"})
                for data in self._take(delta):
                    yield typed_event(data)
        for data in self._end():
            yield typed_event(data)

    def _message(self) -> dict[str, Any]:
        head = self._turn.generation.head
        return {
            "id": head["id"],
            "type": "message",
            "role": "assistant",
            "model": head["model"],
            "determinism": head["determinism"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._turn.generation.usage.message(),
        }

    def _take(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Adds what is new."""
        if delta.content:
            if self._pieces is None or self._blocks[-1]["type"] != "text":
                yield from self._close()
                yield self._open({"type": "text", "text": ""})
            yield self._more(delta.content, {"type": "text_delta", "text": delta.content})
        for call in delta.calls:
            if call.id is not None:
                yield from self._close()
                yield self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                yield self._more(call.arguments, {"type": "input_json_delta", "partial_json": call.arguments})
        if delta.finish_reason:
            self._reason = _reason(delta, any(block["type"] == "tool_use" for block in self._blocks))

    def _end(self) -> Iterator[dict[str, Any]]:
        """The events after the last token."""
        yield from self._close()
        if not self._blocks:
            yield self._open({"type": "text", "text": ""})
            yield from self._close()
        metrics = self._turn.generation.metrics() if self._wanted.metrics else {}
        yield {"type": "message_delta", "delta": self._reason, "usage": self._turn.generation.usage.message(), **metrics}
        yield {"type": "message_stop"}

    def _open(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        self._pieces = []
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _more(self, piece: str, delta: dict[str, Any]) -> dict[str, Any]:
        assert self._pieces is not None
        self._pieces.append(piece)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Ends the block that grows, if there is one."""
        if self._pieces is None:
            return
        block, whole = self._blocks[-1], "".join(self._pieces)
        if block["type"] == "text":
            block["text"] = whole
        else:
            block["input"] = _input(whole)
        self._pieces = None
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _reason(delta: Delta, called: bool) -> dict[str, Any]:
    """Why it ended, as Anthropic says it; OpenAI has "stop" for an answer that `called` the function that the client named."""
    if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
    if delta.finish_reason == "stop" and called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons[delta.finish_reason or "stop"], "stop_sequence": None}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object: as much of it as there is, where the model's JSON is cut off or wrong."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
