"""Request fields and their validation. Nothing is coerced, and no field that would change the answer is ignored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationError, WithJsonSchema

from chairlift.engine.validation import check_tokens
from chairlift.errors import InvalidRequest, brief
from chairlift.sampling import LEAST_TOP_P, SamplingParams
from chairlift.scheduling import LONGEST_MS, Scheduling
from chairlift.server.schema.response_format import StructuredOutputFields
from chairlift.server.session_name import MAX_LENGTH, SessionName

if TYPE_CHECKING:
    from chairlift.engine.engine_info import EngineInfo

MAX_PROMPTS = 256
MAX_ANSWERS = 1024

# Fields that are not supported, with the values that have no effect. Other values are rejected: silently ignoring them
# would change the answer.
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
    "ebnf": ("",),
    "guided_whitespace_pattern": (),
}

# Fields that never change the answer: accepted and ignored.
_WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prediction", "verbosity", "cache_control", "kv_hints", "nvext"),
        *("spaces_between_special_tokens", "stream_interval"),
    )
)

TEXT = {"type": "string", "minLength": 1}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
"""JSON schemas of a prompt as text and as token ids."""

ServiceTier = Literal["auto", "default", "fast", "flex", "ultrafast", "priority", "scale"]
"""OpenAI's tiers; `fast` is its newer name of `priority`."""

REQUEST_ID = r"^[A-Za-z0-9._:/+=@-]{1,128}$"
"""Pattern of request ids."""


class StreamOptions(BaseModel, strict=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_metrics: bool | None = None


class Fields(BaseModel, strict=True, allow_inf_nan=False, extra="ignore", defer_build=True):
    """A request body, and `read`, which validates one."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are rejected, with the values of each that have no effect. A class that declares a field supports it."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change the answer: accepted and ignored."""
    model: str | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """Validates `body`; returns the request and the names of unknown fields. Raises InvalidRequest."""
        refused = {name: harmless for name, harmless in cls.unsupported.items() if name not in cls.model_fields}
        for name, harmless in refused.items():
            value = body.get(name)
            # Compare types too: True equals 1.
            if value is not None and not any(_same(value, one) for one in harmless):
                allowed = f"leave it out or send {' or '.join(map(repr, harmless))}" if harmless else "leave it out"
                raise InvalidRequest(f"{name} is not supported: {allowed}", param=name, code="unsupported_parameter")
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            raise InvalidRequest.from_validation(error) from None
        known = cls.model_fields.keys() | refused.keys() | cls.without_effect
        ignored = [name for name in body if name not in known]
        for name in cls.model_fields:
            if isinstance(options := getattr(request, name), BaseModel):
                ignored += [f"{name}.{inner}" for inner in body[name] if inner not in type(options).model_fields]
        return request, ignored


class GenerationParams(Fields, StructuredOutputFields):
    """Fields for sampling, scheduling and structured output, for every API."""

    unsupported = _UNSUPPORTED
    without_effect = _WITHOUT_EFFECT
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
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    ttft_deadline_ms: float | None = None
    cache_salt: str | None = None
    predicted_tokens: int | None = None
    stream: bool | None = None
    metrics: bool | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=MAX_LENGTH)] | None = None

    def shared_fields(self) -> dict[str, Any]:
        """Returns those of these fields that the request sets."""
        return self.model_dump(include=set(GenerationParams.model_fields), exclude_none=True)

    def session(self, named: SessionName | None) -> SessionName | None:
        """Returns the session that the headers have `named`, else that of the body."""
        return SessionName(self.session_id) if named is None and self.session_id is not None else named


class GenerationRequest(GenerationParams):
    """Fields of OpenAI's completions and chat completions."""

    max_tokens: int | None = None
    stop: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})] = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    n: int | None = None
    best_of: int | None = None
    service_tier: ServiceTier | None = None
    stream_options: StreamOptions | None = None
    energy: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def include_metrics(self) -> bool:
        """Whether the response has `metrics`."""
        return bool(self.metrics or (self.stream_options and self.stream_options.include_metrics))

    def token_limit(self) -> int | None:
        """Maximum tokens to generate, if the request sets it."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """Number of top log-probabilities to return for each generated token; None for no log-probabilities."""
        return None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns the sampling parameters, with the server's `defaults` for those that the request does not set; raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: send true for it, or leave out stream_options", param="stream_options")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be at least 1, or -1 for the whole context, got 0", param="truncate_prompt_tokens"
            )
        fields: dict[str, Any] = {
            **defaults,
            **self._given(SamplingParams),
            "max_tokens": self.token_limit(),
            "logprobs": self.num_logprobs(),
        }
        if self.top_p == 0:
            fields["top_p"] = LEAST_TOP_P
        if self.top_k == -1:
            fields["top_k"] = 0  # clients use both for "off"
        if self.stop is not None:
            if not isinstance(self.stop, (str, list)):
                raise InvalidRequest(f"stop must be a string or a list of strings, got {brief(self.stop)}", param="stop")
            fields["stop"] = [text for text in self.stop if text != ""] if isinstance(self.stop, list) else self.stop or ()
        if self.logit_bias is not None:
            fields["logit_bias"] = _biases(self.logit_bias)
        fields["structured_output"] = self.structured_output()
        return SamplingParams(**fields)

    def scheduling(self, usual: Scheduling, headers: Mapping[str, str], session: SessionName | None = None) -> Scheduling:
        """Returns the tenant's `usual` scheduling parameters with those of `headers`, the body and `session`; raises InvalidRequest."""
        fields: dict[str, Any] = {} if session is None else {"session": session.name, "parent_session": session.parent}
        for name, header in (("deadline_ms", "x-request-deadline-ms"), ("ttft_deadline_ms", "x-request-ttft-deadline-ms")):
            if getattr(self, name) is None and header in headers:
                fields[name] = _milliseconds(header, headers[header])
        return replace(usual, **fields | self._given(Scheduling))

    def truncate(self, prompt: list[int], max_model_len: int) -> list[int]:
        """Keeps the last `truncate_prompt_tokens` tokens of a prompt; -1 keeps those that leave room for the answer in the context."""
        if self.truncate_prompt_tokens is None:
            return prompt
        if self.truncate_prompt_tokens == -1:
            return prompt[-max(1, max_model_len - (self.token_limit() or 1)) :]
        return prompt[-self.truncate_prompt_tokens :]

    def _given(self, kind: type[SamplingParams | Scheduling]) -> dict[str, Any]:
        """Returns what the request sets of the parameters of this kind, which have the names of its fields."""
        names = {item.name for item in fields_of(kind)} & type(self).model_fields.keys()
        values = ((name, getattr(self, name)) for name in names)
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values if value is not None}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema({"anyOf": [TEXT, IDS, {"type": "array", "items": TEXT}, {"type": "array", "items": IDS}]})]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @property
    def prompt_only(self) -> bool:
        """Whether the response repeats only the prompt, for its log-probabilities, without an answer."""
        return bool(self.echo) and self.max_tokens == 0

    def token_limit(self) -> int | None:
        """Returns the limit for the engine: at least one token, because it does not compute a prompt without generating."""
        return 1 if self.prompt_only else self.max_tokens

    def num_logprobs(self) -> int | None:
        """Returns OpenAI's `logprobs`."""
        return self.logprobs

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns the sampling parameters; `best_of` cannot be streamed, and `echo` with `logprobs` includes the prompt's."""
        params = super().params(defaults)
        if self.prompt_only:
            params = replace(params, best_of=None)  # there are no answers to rank
        if self.stream and params.ranked:
            raise InvalidRequest("best_of above n cannot be streamed: leave out stream, or best_of", param="best_of")
        if self.echo and params.logprobs is not None:
            return replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
        return params

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each a text or token ids; raises InvalidRequest."""
        prompts = texts_or_ids(self.prompt, "prompt")
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequest(f"{len(prompts)} prompts in one request, at most {MAX_PROMPTS} are allowed", param="prompt")
        answers = self.best_of or self.n or 1
        if len(prompts) * answers > MAX_ANSWERS:
            message = f"{len(prompts)} prompts with {answers} answers each, at most {MAX_ANSWERS} answers in one request are allowed"
            raise InvalidRequest(message, param="best_of" if self.best_of else "n")
        return prompts


def _milliseconds(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_MS:
        message = f"{header} must be a number of milliseconds above 0 and at most {LONGEST_MS:g}, got {brief(text)}"
        raise InvalidRequest(message, param=header)
    return value


def _biases(fields: object) -> dict[int, float]:
    """Parses OpenAI's map of token ids, written as strings, to biases; SamplingParams checks the values."""
    if not isinstance(fields, dict):
        raise InvalidRequest(f"logit_bias must be an object of token ids and numbers, got {brief(fields)}", param="logit_bias")
    for token in fields:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise InvalidRequest(f"logit_bias has {brief(token)}, which is no token id", param="logit_bias")
    return {int(token): bias for token, bias in fields.items()}


def _same(value: object, harmless: object) -> bool:
    return type(value) is type(harmless) and value == harmless


def is_ids(value: object) -> bool:
    """Whether a prompt is a list of token ids."""
    return isinstance(value, list) and set(map(type, value)) == {int}


def texts_or_ids(value: Any, param: str) -> list[str | list[int]]:
    """Returns the prompts or inputs of a request: a text, token ids, or a list of either. Raises InvalidRequest."""
    if isinstance(value, str) or is_ids(value):
        return [value]
    if isinstance(value, list) and (set(map(type, value)) == {str} or (value and all(map(is_ids, value)))):
        return value
    message = f"{param} must be a string, a list of token ids, or a list of either (none empty), got {brief(value)}"
    raise InvalidRequest(message, param=param)


def check_ids(prompts: Iterable[str | list[int]], info: EngineInfo, param: str) -> None:
    """Raises InvalidRequest unless all token ids in prompts or inputs are the model's."""
    check_tokens(chain.from_iterable(one for one in prompts if not isinstance(one, str)), info, param)
