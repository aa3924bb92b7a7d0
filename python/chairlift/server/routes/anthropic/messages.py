"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.chat.answer import Delta
from chairlift.chat.tools.json_text import parsed_object
from chairlift.server.chat.completion import ChatCompletion, prompt_of
from chairlift.server.chat.request import renamed_fields
from chairlift.server.http.body import beside, read_fields
from chairlift.server.http.responses import Json, ignored_header
from chairlift.server.routes.anthropic.message_request import FIELD_NAMES, CountRequest, MessagesRequest
from chairlift.server.service import service_of
from chairlift.server.streaming import EventStream, typed_event


async def messages(request: Request) -> Response:
    """Answers one request, streamed or whole."""
    body, ignored = await read_fields(request, MessagesRequest)
    chat = await beside(request, body.chat)
    with renamed_fields(FIELD_NAMES):
        completion, cut = await ChatCompletion.begin_within_context(request, chat, ignored, kind="message", prefix="msg_")
    builder = _MessageBuilder(body, completion, cut)
    if body.stream:
        return EventStream(builder.events(), completion.headers, completion.generation.wait_headers)
    return Json(await builder.whole(), headers=completion.headers)


async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens of a conversation, including the chat template's."""
    body, ignored = await read_fields(request, CountRequest, queued=False)
    model, chat = await service_of(request).use(request, body.model), await beside(request, body.chat)
    tokens = await prompt_of(request, model, chat, must_fit=False)
    return Json({"input_tokens": len(tokens)}, headers=ignored_header(ignored))


class _MessageBuilder:
    """Builds the message from increments: thinking, text and tool_use blocks, and the events that report them."""

    def __init__(self, body: MessagesRequest, completion: ChatCompletion, cut: bool) -> None:
        """`cut` says whether the context leaves room for fewer tokens than the request allows."""
        self._body = body
        self._completion = completion
        self._at_limit = "model_context_window_exceeded" if cut else "max_tokens"
        """The stop reason of an answer that reaches its maximum length."""
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] | None = None
        """Text or arguments of the block in progress."""
        self._stop_reason = _stop(None)

    async def whole(self) -> dict[str, Any]:
        """Returns the whole message; raises the engine's errors."""
        async with aclosing(self._completion.deltas()) as deltas:
            async for delta in deltas:
                for _ in self._take(delta):
                    pass
        for _ in self._end():
            pass
        metrics = self._completion.generation.metrics(self._body.metrics)
        return self._message() | {"content": self._blocks, **self._stop_reason, **metrics}

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the message as server-sent events; raises the engine's errors."""
        started = False
        async with aclosing(self._completion.deltas()) as deltas:
            async for delta in deltas:
                if not started:
                    started = True
                    yield typed_event({"type": "message_start", "message": self._message()})
                    yield typed_event({"type": "ping"})
                for data in self._take(delta):
                    yield typed_event(data)
        for data in self._end():
            yield typed_event(data)

    def _message(self) -> dict[str, Any]:
        generation = self._completion.generation
        head = generation.head
        tier = "standard" if generation.service_tier else None
        return {
            "id": head["id"],
            "type": "message",
            "role": "assistant",
            "model": head["model"],
            "determinism": head["determinism"],
            "arithmetic": head["arithmetic"],
            "content": [],
            **_stop(None),
            "usage": {**generation.usage.message(), "inference_geo": None, "service_tier": tier},
            **self._diagnostics(),
        }

    def _diagnostics(self) -> dict[str, Any]:
        """Returns the field `diagnostics`, if the request has it; null if nothing was compared, or nothing differs."""
        if self._body.diagnostics is None:
            return {}
        turn = self._completion.turn
        if turn is None or turn.compared is None:
            return {"diagnostics": None}
        if not turn.compared:
            return {"diagnostics": {"cache_miss_reason": {"type": "previous_message_not_found"}}}
        return {"diagnostics": None if turn.miss is None else turn.miss.anthropic()}

    def _take(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Adds an increment and yields its events."""
        if delta.reasoning:
            if not self._in_block("thinking"):
                yield from self._close()
                yield self._open({"type": "thinking", "thinking": "", "signature": ""})
            yield self._append(delta.reasoning, {"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            if not self._in_block("text"):
                yield from self._close()
                yield self._open(_text_block())
            yield self._append(delta.content, {"type": "text_delta", "text": delta.content})
        for call in delta.calls:
            if call.id is not None:
                yield from self._close()
                yield self._open({"type": "tool_use", "id": call.id, "caller": {"type": "direct"}, "name": call.name, "input": {}})
            if call.arguments:
                yield self._append(call.arguments, {"type": "input_json_delta", "partial_json": call.arguments})
        if delta.finish_reason:
            self._stop_reason = self._reason(delta, any(block["type"] == "tool_use" for block in self._blocks))

    def _end(self) -> Iterator[dict[str, Any]]:
        """Yields the events after the last token."""
        yield from self._close()
        if not self._blocks or (self._blocks[-1]["type"] == "thinking" and self._stop_reason["stop_reason"] != self._at_limit):
            yield self._open(_text_block())
            yield from self._close()
        metrics = self._completion.generation.metrics(self._body.metrics)
        yield {"type": "message_delta", "delta": self._stop_reason, "usage": self._completion.generation.usage.message(), **metrics}
        yield {"type": "message_stop"}

    def _in_block(self, type: str) -> bool:
        return self._pieces is not None and self._blocks[-1]["type"] == type

    def _open(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        self._pieces = []
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _append(self, piece: str, delta: dict[str, Any]) -> dict[str, Any]:
        assert self._pieces is not None
        self._pieces.append(piece)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Completes the block in progress, if any."""
        if self._pieces is None:
            return
        block, whole = self._blocks[-1], "".join(self._pieces)
        if block["type"] in ("text", "thinking"):
            block[block["type"]] = whole
        else:
            block["input"] = parsed_object(whole)
        self._pieces = None
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _reason(self, delta: Delta, called: bool) -> dict[str, Any]:
        """Returns Anthropic's stop reason; OpenAI's is "stop" if the answer `called` the function that the client chose."""
        if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
            return _stop("stop_sequence", delta.stop_reason)
        if delta.finish_reason == "stop" and called:
            return _stop("tool_use")
        reasons = {"stop": "end_turn", "length": self._at_limit, "tool_calls": "tool_use"}
        return _stop(reasons[delta.finish_reason or "stop"])


def _stop(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    """Returns the fields that a message and the event `message_delta` share; None for a message that has not ended."""
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


def _text_block() -> dict[str, Any]:
    return {"type": "text", "text": "", "citations": None}
