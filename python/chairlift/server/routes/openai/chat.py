"""POST /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.chat.answer import Delta, WholeCalls
from chairlift.chat.tools.parser import ToolCallDelta
from chairlift.outputs import TokenLogprobs, ToolCall
from chairlift.server.chat.completion import ChatCompletion, called
from chairlift.server.chat.request import ChatRequest
from chairlift.server.http.body import read_fields
from chairlift.server.http.responses import Json, Rows, large_json
from chairlift.server.model import model_of
from chairlift.server.schema.logprobs import chat_logprobs_json, prompt_logprobs_json
from chairlift.server.streaming import DONE, EventStream, EventTemplate, event


async def chat_completions(request: Request) -> Response:
    """Answers one chat request, streamed or whole."""
    body, ignored = await read_fields(request, ChatRequest)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    completion = await ChatCompletion.begin(request, body, ignored, kind=kind, prefix="chatcmpl-")
    # Mistral's clients refuse an increment of a call that has no name, and those of OpenAI append a name to the earlier one.
    whole_calls = request.headers.get("user-agent", "").startswith("mistral-client-")
    response = _ChatResponse(body, completion, model_of(request).engine.tokenizer, whole_calls=whole_calls)
    if body.stream:
        return EventStream(response.events(), completion.headers, completion.generation.wait_headers)
    whole = await response.whole()
    if body.logprobs or body.prompt_logprobs is not None:
        return await large_json(whole, completion.headers)
    return Json(whole, headers=completion.headers)


class _ChatResponse:
    """Formats a chat completion as OpenAI does, with tools or the older functions."""

    def __init__(self, body: ChatRequest, completion: ChatCompletion, tokenizer: Any, *, whole_calls: bool) -> None:
        """`whole_calls` makes a stream send a call when it has ended."""
        self._body = body
        self._completion = completion
        self._generation = completion.generation
        self._tokenizer = tokenizer
        self._whole_calls = whole_calls

    async def whole(self) -> dict[str, Any]:
        """Returns the response as one object."""
        choices = []
        for index, choice in enumerate(await self._completion.choices()):
            message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None, **self._calls(choice.calls)}
            if self._completion.reasons:
                message |= _reasoning(choice.reasoning)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": None if choice.logprobs is None else self._logprobs(choice.logprobs),
                    "finish_reason": self._finish_reason(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
                }
            )
        generation, body = self._generation, self._body
        extra = generation.metrics(body.include_metrics) | self._completion.diagnostics()
        if body.prompt_logprobs is not None and (logprobs := self._completion.prompt_logprobs) is not None:
            extra["prompt_logprobs"] = Rows(partial(prompt_logprobs_json, self._tokenizer, logprobs, body.prompt_logprobs))
        return {**generation.head, "choices": choices, "usage": generation.usage.json(), **extra}

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the response as server-sent events."""
        generation, body = self._generation, self._body
        head: dict[str, Any] = generation.head | ({"usage": None} if body.include_usage else {})
        templates: dict[tuple[int, bool], EventTemplate] = {}
        started: set[int] = set()
        calls: defaultdict[int, WholeCalls] = defaultdict(WholeCalls)
        always_usage = body.continuous_usage

        def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, **extra: Any) -> bytes:
            if always_usage:
                head["usage"] = generation.usage.json()
            return event(data(index, delta, finish_reason, **extra))

        def data(index: int, delta: dict[str, Any], finish_reason: str | None = None, **extra: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **extra}
            return {**head, "choices": [choice]}

        async with aclosing(self._completion.deltas()) as deltas:
            async for delta in deltas:
                if self._whole_calls:
                    delta = replace(delta, calls=calls[delta.index].push(delta))
                    if delta == Delta(delta.index):
                        continue
                if delta.index not in started:
                    started.add(delta.index)
                    yield chunk(delta.index, {"role": "assistant", "content": None if delta.calls and not delta.content else ""})
                if delta.is_plain and not always_usage:
                    key = delta.index, bool(delta.reasoning)
                    if key not in templates:
                        text = EventTemplate.PLACEHOLDER
                        templates[key] = EventTemplate(data(delta.index, _reasoning(text) if delta.reasoning else {"content": text}))
                    yield templates[key].fill(delta.reasoning or delta.content)
                    continue
                fields: dict[str, Any] = {"content": delta.content} if delta.content else {}
                if delta.reasoning:
                    fields |= _reasoning(delta.reasoning)
                extra: dict[str, Any] = {"stop_reason": delta.stop_reason} if delta.finish_reason else {}
                if delta.logprobs is not None:
                    logprobs = self._logprobs(delta.logprobs)
                    extra["logprobs"] = logprobs | {"content": list(logprobs["content"])}
                yield chunk(delta.index, fields | self._call_deltas(delta.calls), self._finish_reason(delta.finish_reason), **extra)
        extra = generation.metrics(body.include_metrics) | self._completion.diagnostics()
        if body.include_usage or extra:
            usage = {"usage": generation.usage.json()} if body.include_usage else {}
            yield event({**head, "choices": [], **usage, **extra})
        yield DONE

    def _calls(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Returns a message's tool calls."""
        if not calls:
            return {}
        if self._body.legacy:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        return {"tool_calls": [{"id": call.id, **called(call)} for call in calls]}

    def _call_deltas(self, calls: Sequence[ToolCallDelta]) -> dict[str, Any]:
        """Returns the increments of a message's tool calls."""
        if not calls:
            return {}
        if self._body.legacy:  # `functions` allows one call
            name = {} if calls[0].name is None else {"name": calls[0].name}
            return {"function_call": {**name, "arguments": calls[0].arguments}}
        return {"tool_calls": [_call_delta(call) for call in calls]}

    def _finish_reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self._body.legacy else reason

    def _logprobs(self, logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        num_top, as_ids = self._body.top_logprobs or 0, bool(self._body.return_tokens_as_token_ids)
        return {"content": Rows(partial(chat_logprobs_json, self._tokenizer, logprobs, num_top, as_ids)), "refusal": None}


def _reasoning(text: str | None) -> dict[str, Any]:
    """Returns a message's reasoning under both of the names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """Formats a call's next part; only the first has its id and name."""
    if call.name is not None:
        return {"index": call.index, "id": call.id, **called(call)}
    part = {"custom": {"input": call.arguments}} if call.custom else {"function": {"arguments": call.arguments}}
    return {"index": call.index, **part}
