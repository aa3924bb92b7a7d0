"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.outputs import RequestOutput, TokenLogprobs
from chairlift.sampling import SamplingParams
from chairlift.server.generation import Generation
from chairlift.server.http.body import beside, read_fields
from chairlift.server.http.responses import Json, ignored_header, large_json
from chairlift.server.model import ServedModel
from chairlift.server.schema.fields import CompletionRequest, check_ids
from chairlift.server.schema.logprobs import CompletionLogprobs, check_prompt_logprobs, prompt_logprobs_json, text_offsets
from chairlift.server.service import service_of
from chairlift.server.streaming import DONE, EventStream, EventTemplate, event, large_event

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


async def completions(request: Request) -> Response:
    """Answers one completion request, streamed or whole."""
    body, ignored = await read_fields(request, CompletionRequest)
    model = await service_of(request).use(request, body.model)
    params = await beside(request, body.params, model.default_sampling)
    raw_prompts = await beside(request, body.prompts)
    await beside(request, check_ids, raw_prompts, model.engine.info, "prompt")
    limit = model.engine.info.max_model_len
    prompts = [body.truncate(await _tokens(request, model, prompt, body), limit) for prompt in raw_prompts]
    check_prompt_logprobs(prompts, params)
    generation = Generation(request, body, prompts, params, kind="text_completion", prefix="cmpl-", default_max_tokens=DEFAULT_MAX_TOKENS)
    choices = Choices(model, generation, body, params, raw_prompts, prompts)
    headers = ignored_header([*ignored, *body.relaxed])
    if body.stream:
        return EventStream(events(generation, body, choices), headers, generation.wait_headers)
    answer = await whole(generation, body, choices)
    return await completed(answer, params, headers)


async def completed(answer: dict[str, Any], params: SamplingParams, headers: dict[str, str]) -> Response:
    """Returns the response with a whole answer."""
    large = params.logprobs is not None or params.prompt_logprobs is not None
    return await large_json(answer, headers) if large else Json(answer, headers=headers)


async def _tokens(request: Request, model: ServedModel, prompt: str | list[int], body: CompletionRequest) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    must_fit = body.truncate_prompt_tokens is None
    return await model.encode(request, prompt, must_fit=must_fit, add_special_tokens=body.add_special_tokens is not False)


class Choices:
    """Formats the entries of `choices`, as increments for a stream; a whole response is their sum."""

    def __init__(
        self,
        model: ServedModel,
        generation: Generation,
        body: CompletionRequest,
        params: SamplingParams,
        raw_prompts: Sequence[str | Sequence[int]],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._tokenizer = model.engine.tokenizer
        self._logprobs_json = CompletionLogprobs(self._tokenizer, body.logprobs or 0, bool(body.return_tokens_as_token_ids))
        self._generation = generation
        self._body = body
        self._params = params
        self._raw_prompts = raw_prompts
        self._prompts = prompts
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._prompt_chars: dict[int, int] = {}
        """Characters of the prompt that a choice began with, for `echo`."""
        self.newest_prompt: dict[str, Any] | None = None
        """The newest increment with a prompt, which may have many log-probabilities."""

    async def deltas(self) -> AsyncGenerator[dict[str, Any]]:
        """Yields increments of choices; raises the engine's errors."""
        prompt_only, with_logprobs = self._body.prompt_only, self._params.logprobs is not None
        with_prompt = self._body.echo or self._params.prompt_logprobs is not None
        async with aclosing(self._generation.outputs()) as outputs:
            async for index, output in outputs:
                if prompt_only:
                    # The engine generates one token to compute the prompt; it does not count.
                    self._generation.usage.completion = 0
                if with_prompt and index not in self._prompt_chars:
                    # Formatting a long prompt's log-probabilities takes long: do it in a thread.
                    self.newest_prompt = await asyncio.to_thread(self._prompt_delta, index, output)
                    yield self.newest_prompt
                if not output.text and not output.finish_reason and not output.logprobs:
                    continue  # held back: half a character or a possible stop string
                if prompt_only:
                    yield _delta(index, "", "length") | {"stop_reason": None}
                    continue
                delta = _delta(index, output.text, output.finish_reason)
                if with_logprobs:
                    delta["logprobs"] = self._logprobs(index, output)
                if output.finish_reason:
                    delta["stop_reason"] = output.stop_reason
                yield delta

    def _prompt_delta(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Returns a choice's first increment, with the prompt's text and log-probabilities."""
        prompt_index = index // self._params.n
        prompt, body = self._prompts[prompt_index], self._body
        if output.prompt_logprobs is not None:  # the first of n answers has them for all
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        text = self._text(prompt_index) if body.echo else ""
        self._prompt_chars[index] = len(text)
        delta = _delta(index, text, None)
        if body.echo and body.logprobs is not None:
            delta["logprobs"] = self._logprobs_json.json(
                prompt, self._prompt_logprobs[prompt_index], text_offsets(self._tokenizer, prompt, text)
            )
        if body.prompt_logprobs is not None:
            shown = prompt_logprobs_json(self._tokenizer, self._prompt_logprobs[prompt_index], body.prompt_logprobs)
            delta["prompt_logprobs"] = list(shown)
        return delta

    def _text(self, prompt_index: int) -> str:
        """Returns a prompt's text as the client wrote it, or decoded from its tokens."""
        raw, prompt = self._raw_prompts[prompt_index], self._prompts[prompt_index]
        if isinstance(raw, str) and self._body.truncate_prompt_tokens is None:
            return raw
        return self._tokenizer.decode(prompt, skip_special_tokens=self._params.skip_special_tokens)

    def _logprobs(self, index: int, output: RequestOutput) -> dict[str, list[Any]]:
        shown = self._prompt_chars.get(index, 0)
        offsets = [shown + offset for offset in output.text_offsets or ()]
        return self._logprobs_json.json(output.token_ids, output.logprobs or (), offsets)


def _delta(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _append_logprobs(logprobs: dict[str, list[Any]] | None, following: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
    """Appends the next tokens' log-probabilities."""
    if logprobs is None or following is None:
        return logprobs or following
    for name, entries in following.items():
        logprobs[name] += entries
    return logprobs


async def whole(generation: Generation, body: CompletionRequest, choices: Choices) -> dict[str, Any]:
    """Returns the whole response; raises the engine's errors."""
    collected: dict[int, dict[str, Any]] = {}
    texts: dict[int, list[str]] = {}
    async with aclosing(choices.deltas()) as deltas:
        async for delta in deltas:
            index = delta["index"]
            texts.setdefault(index, []).append(delta["text"])
            choice = collected.setdefault(index, _delta(index, "", None))
            choice |= delta | {"logprobs": _append_logprobs(choice["logprobs"], delta["logprobs"])}
    for index, choice in collected.items():
        choice["text"] = "".join(texts[index])
    metrics = generation.metrics(body.include_metrics)
    ordered = [collected[index] for index in sorted(collected)]
    return {**generation.head, "choices": ordered, "usage": generation.usage.json(), **metrics}


async def events(generation: Generation, body: CompletionRequest, choices: Choices) -> AsyncGenerator[bytes]:
    """Yields the response as server-sent events; raises the engine's errors."""
    head: dict[str, Any] = generation.head | ({"usage": None} if body.include_usage else {})
    templates: dict[int, EventTemplate] = {}
    always_usage = body.continuous_usage
    async with aclosing(choices.deltas()) as deltas:
        async for delta in deltas:
            if delta == _delta(index := delta["index"], text := delta["text"], None) and not always_usage:
                if index not in templates:
                    templates[index] = EventTemplate({**head, "choices": [_delta(index, EventTemplate.PLACEHOLDER, None)]})
                yield templates[index].fill(text)
                continue
            if always_usage:
                head["usage"] = generation.usage.json()
            data = {**head, "choices": [delta]}
            yield await large_event(data) if delta is choices.newest_prompt else event(data)
    if body.include_usage or body.include_metrics:
        if body.include_usage:
            head["usage"] = generation.usage.json()
        yield event({**head, "choices": [], **generation.metrics(body.include_metrics)})
    yield DONE
