"""The fields of a request, checked: nothing is coerced, and nothing that would change the answer is ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from chairlift.errors import InvalidRequest
from chairlift.sampling import SamplingParams
from chairlift.scheduling import LONGEST_MS, Scheduling
from chairlift.server.errors import brief
from chairlift.server.schema.response_format import Formats

MAX_PROMPTS = 256
MAX_ANSWERS = 1024

# Fields that cannot be honoured, with the values that ask for nothing. Anything else is refused: an answer that silently
# lacks what was asked for is worse than none.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "kv_transfer_params": (),
    "lora_request": (),
}

# Fields that never change the text: taken without a word.
_WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prediction", "reasoning_effort", "verbosity"),
        *("spaces_between_special_tokens", "stream_interval"),
    )
)

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

REQUEST_ID = r"^[A-Za-z0-9._:/+=@-]{1,128}$"
"""What a request may be called."""

TIERS = {"auto": 0, "default": 0, "scale": 0, "priority": -10, "flex": 10}
"""OpenAI's service tiers as priorities, of which lower ones go first; `flex` is batch work."""


class StreamOptions(BaseModel):
    """What a stream carries beside text."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_metrics: bool | None = None


class Fields(BaseModel):
    """A request's body: what it may hold, and `read`, which checks one."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are refused, with the values of each that ask for nothing; one that a class declares is supported there."""
    idle: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change the answer: taken without a word."""
    model: str | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """Checks `body`; returns the request and the names of fields that mean nothing here. Raises InvalidRequest."""
        refused = {name: harmless for name, harmless in cls.unsupported.items() if name not in cls.model_fields}
        for name, harmless in refused.items():
            value = body.get(name)
            # The types are compared too: True equals 1.
            if value is not None and not any(_same(value, one) for one in harmless):
                allowed = f"leave it out or send {' or '.join(map(repr, harmless))}" if harmless else "leave it out"
                raise InvalidRequest(f"{name} is not supported: {allowed}", param=name, code="unsupported_parameter")
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            raise _invalid(error) from None
        known = cls.model_fields.keys() | refused.keys() | cls.idle
        ignored = [name for name in body if name not in known]
        for name in cls.model_fields:
            if isinstance(options := getattr(request, name), BaseModel):
                ignored += [f"{name}.{inner}" for inner in body[name] if inner not in type(options).model_fields]
        return request, ignored


class GenerationParams(Fields, Formats):
    """How a request may be sampled and scheduled, and what form its answer has, whatever the API that it belongs to."""

    unsupported = _UNSUPPORTED
    idle = _WITHOUT_EFFECT
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: Annotated[Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})] = None
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    ttft_deadline_ms: float | None = None
    cache_salt: str | None = None
    predicted_tokens: int | None = None
    stream: bool | None = None
    metrics: bool | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None

    def tuned(self) -> dict[str, Any]:
        """Those of these fields that were given."""
        return self.model_dump(include=set(GenerationParams.model_fields), exclude_none=True)


class GenerationRequest(GenerationParams):
    """What both of OpenAI's completion routes take."""

    max_tokens: int | None = None
    stop: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})] = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    n: int | None = None
    best_of: int | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream counts tokens."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def include_metrics(self) -> bool:
        """Whether the answer ends with its timings."""
        return bool(self.metrics or (self.stream_options and self.stream_options.include_metrics))

    def limit(self) -> int | None:
        """How many tokens may be generated, if the request says so."""
        return self.max_tokens

    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told beside each of the answer's; None if not even its own log-probability is."""
        return None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The request's sampling settings, and the server's `defaults` for those that it does not set; raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: send true for it, or leave out stream_options", param="stream_options")
        given: dict[str, Any] = {**defaults, "max_tokens": self.limit()}
        given |= self._given("temperature", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")
        given |= self._given("ignore_eos", "min_tokens", "n", "best_of", "prompt_logprobs")
        given |= self._given("include_stop_str_in_output", "skip_special_tokens")
        given["logprobs"] = self.likeliest()
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k  # both are in use for "off"
        if self.stop is not None:
            if not isinstance(self.stop, (str, list)):
                raise InvalidRequest(f"stop must be a string or a list of strings, got {brief(self.stop)}", param="stop")
            given["stop"] = self.stop
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
            if (listed := getattr(self, name)) is not None:
                given[name] = tuple(listed)
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias)
        given["structured_output"] = self.structure()
        return SamplingParams(**given)

    def scheduling(self, tenant: str, headers: Mapping[str, str]) -> Scheduling:
        """The request's place among others, `tenant` being whose it is; what `headers` say the body may overrule. Raises InvalidRequest."""
        given: dict[str, Any] = {"tenant": tenant, "priority": TIERS[self.service_tier or "default"]}
        for name, header in (("deadline_ms", "x-request-deadline-ms"), ("ttft_deadline_ms", "x-request-ttft-deadline-ms")):
            if getattr(self, name) is None and header in headers:
                given[name] = _milliseconds(header, headers[header])
        return Scheduling(**given | self._given("priority", "deadline_ms", "ttft_deadline_ms", "cache_salt", "predicted_tokens"))

    def tier(self) -> dict[str, Any]:
        """What the answer repeats of the request: the tier that served it, if it asked for one."""
        if self.service_tier is None:
            return {}
        return {"service_tier": self.service_tier if TIERS[self.service_tier] else "default"}

    def cut(self, prompt: list[int]) -> list[int]:
        """The end of a prompt's tokens, if the request wants no more of it."""
        return prompt if self.truncate_prompt_tokens is None else prompt[-self.truncate_prompt_tokens :]

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT}, {"type": "array", "items": _IDS}]})]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @property
    def scoring(self) -> bool:
        """Whether only the prompt is wanted back, with its log-probabilities say, and no answer to it."""
        return bool(self.echo) and self.max_tokens == 0

    def limit(self) -> int | None:
        """One token at least: the engine reads a prompt only to go on from it."""
        return 1 if self.scoring else self.max_tokens

    def likeliest(self) -> int | None:
        """What OpenAI calls `logprobs` here."""
        return self.logprobs

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """As for any request, but the best answers are known only when all have ended, and `echo` shows the prompt as it does answers."""
        params = super().params(defaults)
        if self.scoring:
            params = replace(params, best_of=None)  # there are no answers to choose from
        if self.stream and params.ranked:
            raise InvalidRequest("best_of above n can't be streamed: leave out stream, or best_of", param="best_of")
        if self.echo and params.logprobs is not None:
            return replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
        return params

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, each a text or its token ids; raises InvalidRequest."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if _ids(prompt):
                return [prompt]
            if all(isinstance(one, str) for one in prompt) or all(_ids(one) for one in prompt):
                if len(prompt) > MAX_PROMPTS:
                    raise InvalidRequest(f"{len(prompt)} prompts in one request, at most {MAX_PROMPTS} are allowed", param="prompt")
                answers = self.best_of or self.n or 1
                if len(prompt) * answers > MAX_ANSWERS:
                    message = f"{len(prompt)} prompts with {answers} answers each; at most {MAX_ANSWERS} answers are made for one request"
                    raise InvalidRequest(message, param="best_of" if self.best_of else "n")
                return prompt
        raise InvalidRequest(
            f"prompt must be a string, a list of token ids, or a list of either (none empty), got {brief(prompt)}", param="prompt"
        )


def _milliseconds(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_MS:
        message = f"{header} must be a number of milliseconds above 0 and at most {LONGEST_MS:g}, got {brief(text)}"
        raise InvalidRequest(message, param=header)
    return value


def _biases(given: object) -> dict[int, float]:
    """OpenAI's map of token ids, written as strings, to what is added to their logits; SamplingParams has the bounds."""
    if not isinstance(given, dict):
        raise InvalidRequest(f"logit_bias must be an object of token ids and numbers, got {brief(given)}", param="logit_bias")
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise InvalidRequest(f"logit_bias has {brief(token)}, which is no token id", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _same(value: object, harmless: object) -> bool:
    return type(value) is type(harmless) and value == harmless


def _ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first thing that is wrong, with the path of the field as a client writes it."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return InvalidRequest(f"{path} is missing", param=path)
    _, should, wanted = first["msg"].replace(" after validation", "").partition(" should ")
    fault = f"it should {wanted}" if should else first["msg"]
    return InvalidRequest(f"{path} is not right: {fault}, got {brief(first['input'])}", param=path)
