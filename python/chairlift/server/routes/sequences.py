"""/v1/sequences: live sequences, which stay computed between generations and can be forked."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from chairlift.engine.async_live_sequence import AsyncLiveSequence
from chairlift.engine.held_sequences import COMPUTE, LEASE, LONGEST_LEASE, MAX_PER_TENANT
from chairlift.errors import InvalidRequest, brief
from chairlift.sampling import SamplingParams
from chairlift.server.chat.completion import prompt_of
from chairlift.server.chat.request import PromptOrMessages
from chairlift.server.errors import renamed_params
from chairlift.server.generation import Generation
from chairlift.server.http.body import beside, read_fields
from chairlift.server.http.responses import Json, ignored_header
from chairlift.server.model import ServedModel, model_of
from chairlift.server.routes.openai.completions import DEFAULT_MAX_TOKENS, Choices, completed, events, whole
from chairlift.server.schema.fields import (
    IDS,
    REQUEST_ID,
    TEXT,
    CompletionRequest,
    Fields,
    GenerationRequest,
    ServiceTier,
    check_ids,
    is_ids,
)
from chairlift.server.sequences import ServedSequence
from chairlift.server.service import service_of
from chairlift.server.streaming import EventStream

_OWN_FIELDS = {"priority", "service_tier", "cache_salt"}
"""Fields of the opening request that hold for all generations."""

_REFUSED = {
    **dict.fromkeys(_OWN_FIELDS, "it is set when the sequence is opened, and the priority also with PATCH"),
    **dict.fromkeys(("prompt", "add_special_tokens"), "append to the sequence instead"),
    **dict.fromkeys(("n", "best_of"), "fork the sequence for several answers"),
    **dict.fromkeys(("echo", "prompt_logprobs", "truncate_prompt_tokens"), "leave it out"),
}
"""Fields of completions that a generation from a sequence does not take, each with what to do."""


def _hide_refused(schema: dict[str, Any]) -> None:
    for name in _REFUSED:
        schema["properties"].pop(name, None)


class SequenceOpenRequest(PromptOrMessages):
    """POST /v1/sequences: a prompt, or a conversation as in /v1/chat/completions."""

    prompt: Annotated[Any, WithJsonSchema({"anyOf": [TEXT, IDS]})] = None
    lease_seconds: Annotated[float, Field(gt=0, le=LONGEST_LEASE)] | None = None
    priority: int | None = None
    service_tier: ServiceTier | None = None
    cache_salt: str | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None

    async def tokens(self, request: Request, model: ServedModel) -> Sequence[int]:
        """Returns the prompt's token ids; raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either a prompt or messages", param="prompt")
        if self.prompt is None:
            return await prompt_of(request, model, await asyncio.to_thread(self.chat))
        if await beside(request, is_ids, self.prompt):
            await beside(request, check_ids, [self.prompt], model.engine.info, "prompt")
            return await beside(request, array, "i", self.prompt)
        if not isinstance(self.prompt, str):
            raise InvalidRequest(f"prompt must be a string or a list of token ids, got {brief(self.prompt)}", param="prompt")
        return await model.encode(request, self.prompt, add_special_tokens=self.add_special_tokens is not False)


class SequenceForkRequest(Fields):
    """POST /v1/sequences/{id}/fork."""

    n: Annotated[int, Field(ge=1, le=MAX_PER_TENANT)] | None = None


class SequenceAppendRequest(Fields):
    """POST /v1/sequences/{id}/append: a text or token ids. With `compute` the response waits until these are computed."""

    text: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)] | None = None
    compute: bool | None = None


class SequenceRewindRequest(Fields):
    """POST /v1/sequences/{id}/rewind."""

    count: int


class SequenceUpdateRequest(Fields):
    """PATCH /v1/sequences/{id}."""

    priority: int


class SequenceGenerateRequest(CompletionRequest, json_schema_extra=_hide_refused):
    """POST /v1/sequences/{id}/generate: the fields of /v1/completions, without those about prompts and several answers."""

    prompt: Any = None

    def params(self, defaults: Any) -> SamplingParams:
        """Returns the sampling parameters; raises InvalidRequest."""
        for name, hint in _REFUSED.items():
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name} is not supported for a live sequence: {hint}", param=name, code="unsupported_parameter")
        return super().params(defaults)


async def open_sequence(request: Request) -> Response:
    """Computes a prompt and holds it."""
    service = service_of(request)
    body, ignored = await read_fields(request, SequenceOpenRequest)
    model = await service.use(request, body.model, adapters=False)
    prompt = await body.tokens(request, model)
    fields = body.model_dump(include=_OWN_FIELDS, exclude_none=True)
    generation = GenerationRequest(**fields, request_id=body.request_id)
    tier = service.tiers.choose(generation.service_tier, request.state.tenant)
    scheduling = generation.scheduling(request.state.ticket.tenant.scheduling(tier), request.headers)
    # Deadlines in the headers are those of this request.
    scheduling = replace(scheduling, deadline_ms=None, ttft_deadline_ms=None)
    tenant = request.state.ticket.tenant
    service.sequences.check_room(tenant)
    scheduling = service.tiers.bound(scheduling, model.engine.config.scheduling_policy)
    sequence = model.engine.hold(prompt, scheduling, body.lease_seconds or LEASE)
    served = service.sequences.add(tenant, model, sequence, fields)
    try:
        await _compute(request, generation, model, sequence)
    except BaseException:
        sequence.drop()
        raise
    return Json(served.json(), headers=ignored_header(ignored))


async def list_sequences(request: Request) -> Response:
    """Lists the tenant's sequences, oldest first."""
    return _list_of(service_of(request).sequences.of(request.state.tenant), {})


async def get_sequence(request: Request) -> Response:
    """Returns a sequence with its text."""
    request.state.ticket.admit(queued=False)
    served = _served(request)
    tokenizer = served.model.engine.tokenizer
    text = await asyncio.to_thread(tokenizer.decode, served.sequence.token_ids)
    return Json(served.json() | {"text": text})


async def update_sequence(request: Request) -> Response:
    """Changes the priority, also of a running generation, which may be all that the tenant may run."""
    _served(request)  # raises before the body is read
    body, ignored = await read_fields(request, SequenceUpdateRequest, queued=False, counted=False)
    served = _served(request)
    priority = service_of(request).tiers.priority(body.priority, request.state.tenant)
    served.sequence.priority = served.fields["priority"] = priority
    return Json(served.json(), headers=ignored_header(ignored))


async def delete_sequence(request: Request) -> Response:
    """Drops a sequence and ends its generation."""
    served = _served(request)
    served.sequence.drop()
    return Json({"id": served.id, "object": "sequence", "deleted": True})


async def fork(request: Request) -> Response:
    """Copies a sequence."""
    service = service_of(request)
    body, ignored = await read_fields(request, SequenceForkRequest, required=False)
    served, count = _served(request), body.n or 1
    sequence, tenant = served.sequence, request.state.ticket.tenant
    sequence.check_room(count)
    if not sequence.busy:
        await _compute(request, GenerationRequest(**served.fields), served.model, sequence)
    service.sequences.check_room(tenant, count)
    forks = [service.sequences.add(tenant, served.model, one, dict(served.fields)) for one in sequence.fork_now(count)]
    return _list_of(forks, ignored_header(ignored))


async def append(request: Request) -> Response:
    """Appends to a sequence."""
    body, ignored = await read_fields(request, SequenceAppendRequest)
    served = _served(request)
    param, content = ("tokens", body.tokens) if body.text is None else ("text", body.text)
    if content is None or (body.text is not None and body.tokens is not None):
        raise InvalidRequest("send either text or tokens", param="text")
    with renamed_params(content=param):
        if isinstance(content, str):
            content = await served.model.encode(request, content, add_special_tokens=False)
        else:
            await beside(request, check_ids, [content], served.model.engine.info, param)
        served.sequence.append_tokens(content)
    if body.compute:
        await _compute(request, GenerationRequest(**served.fields), served.model, served.sequence)
    return Json(served.json(), headers=ignored_header(ignored))


async def rewind(request: Request) -> Response:
    """Removes the last tokens of a sequence."""
    body, ignored = await read_fields(request, SequenceRewindRequest, queued=False)
    served = _served(request)
    served.sequence.rewind(body.count)
    return Json(served.json(), headers=ignored_header(ignored))


async def generate(request: Request) -> Response:
    """Generates from a sequence, which keeps the tokens. The response is that of /v1/completions, streamed or whole."""
    body, ignored = await read_fields(request, SequenceGenerateRequest, required=False)
    served = _served(request)
    if body.model is not None and service_of(request).find(body.model, adapters=False) is not served.model:
        raise InvalidRequest(f"the sequence belongs to the model {served.model.name}: leave out model", param="model")
    params = await beside(request, body.params, served.model.default_sampling)
    served.sequence.params(params)
    await service_of(request).use(request, served.model.name)
    headers = ignored_header([*ignored, *body.relaxed])
    body = body.model_copy(update=served.fields)
    if body.stream:
        return EventStream(_events(request, body, params, served), headers)
    with _generating(request, body, params, served) as (generation, choices):
        answer = await whole(generation, body, choices)
    return await completed(answer | {"sequence": served.json()}, params, headers)


async def _events(request: Request, body: SequenceGenerateRequest, params: SamplingParams, served: ServedSequence) -> AsyncGenerator[bytes]:
    with _generating(request, body, params, served) as (generation, choices):
        async with aclosing(events(generation, body, choices)) as all_events:
            async for event in all_events:
                yield event


@contextmanager
def _generating(
    request: Request, body: SequenceGenerateRequest, params: SamplingParams, served: ServedSequence
) -> Iterator[tuple[Generation, Choices]]:
    """Runs a generation in the block."""
    sequence = served.sequence
    with sequence.generating() as prompt:
        generation = Generation(
            request,
            body,
            [prompt],
            sequence.params(params),
            kind="text_completion",
            prefix="cmpl-",
            default_max_tokens=DEFAULT_MAX_TOKENS,
            sequence=sequence,
        )
        # The score needs log-probabilities, but the client sees only those that it asked for.
        yield generation, Choices(model_of(request), generation, body, params, [prompt], [prompt])


async def _compute(request: Request, body: GenerationRequest, model: ServedModel, sequence: AsyncLiveSequence) -> None:
    """Computes what was appended, after `model` was loaded."""
    if sequence.uncomputed:
        await service_of(request).use(request, model.name)
        with sequence.computing() as prompt:
            generation = Generation(request, body, [prompt], COMPUTE, kind="sequence", prefix="seqcmpl-", sequence=sequence)
            async with aclosing(generation.outputs()) as outputs:
                async for _ in outputs:
                    pass


def _served(request: Request) -> ServedSequence:
    """Returns the request's sequence, whose model may not be loaded."""
    return service_of(request).sequences.get(request.state.tenant, request.path_params["id"])


def _list_of(sequences: list[ServedSequence], headers: dict[str, str]) -> Response:
    return Json({"object": "list", "data": [served.json() for served in sequences]}, headers=headers)
