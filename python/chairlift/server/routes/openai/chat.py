"""POST /v1/chat/completions: the assistant's next turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.outputs import TokenLogprobs
from chairlift.server.chat.completion import Call, ChatCompletion
from chairlift.server.chat.request import ChatRequest
from chairlift.server.chat.tools.call import CallDelta
from chairlift.server.http.body import read_json
from chairlift.server.http.responses import Json
from chairlift.server.schema.logprobs import of_chat, of_prompt
from chairlift.server.service import service_of
from chairlift.server.streaming import DONE, EventStream, Refill, event


async def chat_completions(request: Request) -> Response:
    """Answers one chat request, as a stream or whole."""
    wanted, ignored = ChatRequest.read(await read_json(request))
    kind = "chat.completion.chunk" if wanted.stream else "chat.completion"
    turn = await ChatCompletion.begin(request, wanted, ignored, kind=kind, prefix="chatcmpl-", stream=bool(wanted.stream))
    shape = _Shape(wanted, turn, service_of(request).engine.tokenizer)
    if wanted.stream:
        return EventStream(shape.events(), turn.headers)
    return Json(await shape.whole(), headers=turn.headers)


class _Shape:
    """A turn in OpenAI's shape, that of tools or the older one of functions."""

    def __init__(self, wanted: ChatRequest, turn: ChatCompletion, tokenizer: Any) -> None:
        self._wanted = wanted
        self._turn = turn
        self._generation = turn.generation
        self._tokenizer = tokenizer

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        choices = []
        for index, answer in enumerate(await self._turn.whole()):
            message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None, **self._calls(answer.calls)}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(answer.logprobs),
                    "finish_reason": self._finish(answer.finish_reason),
                    "stop_reason": answer.stop_reason,
                }
            )
        generation, wanted = self._generation, self._wanted
        more = generation.metrics() if wanted.include_metrics else {}
        if wanted.prompt_logprobs is not None and (found := self._turn.prompt_logprobs) is not None:
            more["prompt_logprobs"] = await asyncio.to_thread(of_prompt, self._tokenizer, found, wanted.prompt_logprobs)
        return {**generation.head, **wanted.tier(), "choices": choices, "usage": generation.usage.json(), **more}

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events."""
        generation, wanted = self._generation, self._wanted
        head: dict[str, Any] = generation.head | wanted.tier() | ({"usage": None} if wanted.include_usage else {})
        plain: dict[int, Refill] = {}
        always_usage = wanted.continuous_usage

        def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
            if always_usage:
                head["usage"] = generation.usage.json()
            return event(data(index, delta, finish_reason, **more))

        def data(index: int, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **more}
            return {**head, "choices": [choice]}

        async with aclosing(self._turn.deltas()) as deltas:
            async for delta in deltas:
                if delta.index not in plain:
                    plain[delta.index] = Refill(data(delta.index, {"content": Refill.HOLE}))
                    yield chunk(delta.index, {"role": "assistant", "content": None if delta.calls and not delta.content else ""})
                if delta.is_plain and not always_usage:
                    yield plain[delta.index].event(delta.content)
                    continue
                news: dict[str, Any] = {"content": delta.content} if delta.content else {}
                more: dict[str, Any] = {"stop_reason": delta.stop_reason} if delta.finish_reason else {}
                if delta.logprobs is not None:
                    more["logprobs"] = self._logprobs(delta.logprobs)
                yield chunk(delta.index, news | self._news(delta.calls), self._finish(delta.finish_reason), **more)
        metrics = generation.metrics() if wanted.include_metrics else {}
        if wanted.include_usage or metrics:
            usage = {"usage": generation.usage.json()} if wanted.include_usage else {}
            yield event({**head, "choices": [], **usage, **metrics})
        yield DONE

    def _calls(self, calls: Sequence[Call]) -> dict[str, Any]:
        """A message's calls."""
        if not calls:
            return {}
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        if self._wanted.legacy:
            return {"function_call": functions[0]}
        return {"tool_calls": [{"id": call.id, "type": "function", "function": told} for call, told in zip(calls, functions, strict=True)]}

    def _news(self, calls: Sequence[CallDelta]) -> dict[str, Any]:
        """What is new of a message's calls."""
        if not calls:
            return {}
        if self._wanted.legacy:  # which knows of one call
            named = {} if calls[0].name is None else {"name": calls[0].name}
            return {"function_call": {**named, "arguments": calls[0].arguments}}
        return {"tool_calls": [_part(call) for call in calls]}

    def _finish(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self._wanted.legacy else reason

    def _logprobs(self, found: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        likeliest, as_ids = self._wanted.top_logprobs or 0, bool(self._wanted.return_tokens_as_token_ids)
        return {"content": of_chat(self._tokenizer, found, likeliest, as_ids), "refusal": None}


def _part(call: CallDelta) -> dict[str, Any]:
    """One call's next piece; only the first says whose it is."""
    if call.name is None:
        return {"index": call.position, "function": {"arguments": call.arguments}}
    return {
        "index": call.position,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
