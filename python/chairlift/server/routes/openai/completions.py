"""POST /v1/completions: text goes on from a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from chairlift.outputs import RequestOutput, TokenLogprobs
from chairlift.sampling import SamplingParams
from chairlift.server.generation import Generation
from chairlift.server.http.body import read_json
from chairlift.server.http.responses import Json, ignored_header
from chairlift.server.schema.fields import CompletionRequest
from chairlift.server.schema.logprobs import Columns, check_scored, of_prompt, places
from chairlift.server.service import Service, service_of
from chairlift.server.streaming import DONE, EventStream, event

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, and every client's expectation."""


async def completions(request: Request) -> Response:
    """Answers one completion request, as a stream or whole."""
    service = service_of(request)
    wanted, ignored = CompletionRequest.read(await read_json(request))
    service.check_model(wanted.model)
    params = wanted.params(service.default_sampling)
    scheduling = wanted.scheduling(request.state.tenant, request.headers)
    given = wanted.prompts()
    prompts = [wanted.cut(await _tokens(service, one, wanted)) for one in given]
    check_scored(prompts, params)
    generation = Generation(
        service,
        prompts,
        params,
        scheduling,
        context=request.state.context,
        ticket=request.state.ticket,
        kind="text_completion",
        prefix="cmpl-",
        request_id=wanted.request_id or request.state.context.request_id,
        stream=bool(wanted.stream),
        default=DEFAULT_MAX_TOKENS,
    )
    choices = _Choices(service, generation, wanted, params, given, prompts)
    headers = ignored_header(ignored)
    if wanted.stream:
        return EventStream(_events(generation, wanted, choices), headers)
    whole = await _whole(generation, wanted, choices)
    return await asyncio.to_thread(Json, whole, headers=headers) if params.prompt_logprobs is not None else Json(whole, headers=headers)


async def _tokens(service: Service, prompt: str | list[int], wanted: CompletionRequest) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if wanted.truncate_prompt_tokens is None:
        service.check_length(prompt)
    return await service.engine.encode(prompt, add_special_tokens=wanted.add_special_tokens is not False)


class _Choices:
    """What is new in each choice, as it comes: the `choices` entries of a stream, of which a whole answer is the sum."""

    def __init__(
        self,
        service: Service,
        generation: Generation,
        wanted: CompletionRequest,
        params: SamplingParams,
        given: list[str | list[int]],
        prompts: list[list[int]],
    ) -> None:
        self._tokenizer = service.engine.tokenizer
        self._columns = Columns(self._tokenizer, wanted.logprobs or 0, bool(wanted.return_tokens_as_token_ids))
        self._generation = generation
        self._wanted = wanted
        self._params = params
        self._given = given
        self._prompts = prompts
        self._scored: dict[int, list[TokenLogprobs | None]] = {}
        self._shown: dict[int, int] = {}
        """Characters of the prompt that a choice began with."""

    async def pieces(self) -> AsyncGenerator[dict[str, Any]]:
        """Yields a choice's next part; raises what the engine raises."""
        scoring, answered = self._wanted.scoring, self._params.logprobs is not None
        beginning = self._wanted.echo or self._params.prompt_logprobs is not None
        async with aclosing(self._generation.outputs()) as outputs:
            async for index, output in outputs:
                if scoring:
                    # The one token is our way to have the prompt read, not the client's wish.
                    self._generation.usage.completion = 0
                if beginning and index not in self._shown:
                    # A long prompt's log-probabilities take a while to write out: not while others wait for their tokens.
                    yield await asyncio.to_thread(self._beginning, index, output)
                if not output.text and not output.finish_reason and not output.logprobs:
                    continue  # held back: half a character, or what may become a stop string
                if scoring:
                    yield _piece(index, "", "length") | {"stop_reason": None}
                    continue
                piece = _piece(index, output.text, output.finish_reason)
                if answered:
                    piece["logprobs"] = self._answered(index, output)
                if output.finish_reason:
                    piece["stop_reason"] = output.stop_reason
                yield piece

    def _beginning(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """What a choice says of its prompt, before anything of its own."""
        which = index // self._params.n
        prompt, wanted = self._prompts[which], self._wanted
        if output.prompt_logprobs is not None:  # the first of n answers brings them for all
            self._scored[which] = output.prompt_logprobs
        text = self._text(which) if wanted.echo else ""
        self._shown[index] = len(text)
        piece = _piece(index, text, None)
        if wanted.echo and wanted.logprobs is not None:
            piece["logprobs"] = self._columns.json(prompt, self._scored[which], places(self._tokenizer, prompt, text))
        if wanted.prompt_logprobs is not None:
            piece["prompt_logprobs"] = of_prompt(self._tokenizer, self._scored[which], wanted.prompt_logprobs)
        return piece

    def _text(self, which: int) -> str:
        """A prompt as it was written, or as its tokens read."""
        given, prompt = self._given[which], self._prompts[which]
        if isinstance(given, str) and self._wanted.truncate_prompt_tokens is None:
            return given
        return self._tokenizer.decode(prompt, skip_special_tokens=self._params.skip_special_tokens)

    def _answered(self, index: int, output: RequestOutput) -> dict[str, list[Any]]:
        shown = self._shown.get(index, 0)
        offsets = [shown + offset for offset in output.text_offsets or ()]
        return self._columns.json(output.token_ids, output.logprobs or (), offsets)


def _piece(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _longer(columns: dict[str, list[Any]] | None, more: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
    """Log-probabilities so far, with the next."""
    if columns is None or more is None:
        return columns or more
    for name, entries in more.items():
        columns[name] += entries
    return columns


async def _whole(generation: Generation, wanted: CompletionRequest, choices: _Choices) -> dict[str, Any]:
    whole: dict[int, dict[str, Any]] = {}
    texts: dict[int, list[str]] = {}
    async with aclosing(choices.pieces()) as pieces:
        async for piece in pieces:
            index = piece["index"]
            texts.setdefault(index, []).append(piece["text"])
            choice = whole.setdefault(index, _piece(index, "", None))
            choice |= piece | {"logprobs": _longer(choice["logprobs"], piece["logprobs"])}
    for index, choice in whole.items():
        choice["text"] = "".join(texts[index])
    metrics = generation.metrics() if wanted.include_metrics else {}
    ordered = [whole[index] for index in sorted(whole)]
    return {**generation.head, **wanted.tier(), "choices": ordered, "usage": generation.usage.json(), **metrics}


async def _events(generation: Generation, wanted: CompletionRequest, choices: _Choices) -> AsyncGenerator[bytes]:
    head: dict[str, Any] = generation.head | wanted.tier() | ({"usage": None} if wanted.include_usage else {})
    async with aclosing(choices.pieces()) as pieces:
        async for piece in pieces:
            if wanted.continuous_usage:
                head["usage"] = generation.usage.json()
            yield event({**head, "choices": [piece]})
    if wanted.include_usage or wanted.include_metrics:
        if wanted.include_usage:
            head["usage"] = generation.usage.json()
        yield event({**head, "choices": [], **(generation.metrics() if wanted.include_metrics else {})})
    yield DONE
