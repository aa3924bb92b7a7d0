"""The fields of a request, checked: nothing is coerced, and nothing that would change the answer is ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chairlift.errors import InvalidRequest
from chairlift.sampling import SamplingParams
from chairlift.scheduling import LONGEST_MS, Scheduling
from chairlift.server.errors import brief

MAX_PROMPTS = 256
MAX_ANSWERS = 1024
MAX_TOOLS = 128
MAX_MESSAGES = 4096

# Fields that cannot be honoured yet, with the values that ask for nothing. Anything else is refused: an answer that
# silently lacks what was asked for is worse than none.
_NOT_YET: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "suffix": ("",),
    "min_tokens": (0,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "kv_transfer_params": (),
    "lora_request": (),
}

# Fields that never change the text: taken without a word.
_WITHOUT_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id"),
        *("parallel_tool_calls", "prediction", "reasoning_effort", "verbosity"),
        *("spaces_between_special_tokens", "stream_interval"),
    )
)

TIERS = {"auto": 0, "default": 0, "scale": 0, "priority": -10, "flex": 10}
"""OpenAI's service tiers as priorities, of which lower ones go first; `flex` is batch work."""


class StreamOptions(BaseModel):
    """What a stream carries beside text."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What both completion routes take."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Any = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    priority: int | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    deadline_ms: float | None = None
    ttft_deadline_ms: float | None = None
    cache_salt: str | None = None
    predicted_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """Checks `body`; returns the request and the names of fields that mean nothing here. Raises InvalidRequest."""
        for name, harmless in _NOT_YET.items():
            value = body.get(name)
            # The types are compared too: True equals 1.
            if value is not None and not any(_same(value, one) for one in harmless):
                allowed = f"leave it out or send {' or '.join(map(repr, harmless))}" if harmless else "leave it out"
                raise InvalidRequest(f"{name} is not supported yet: {allowed}", param=name, code="unsupported_parameter")
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            raise _invalid(error) from None
        known = cls.model_fields.keys() | _NOT_YET.keys() | _WITHOUT_EFFECT
        return request, [name for name in body if name not in known]

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream counts tokens."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def limit(self) -> int | None:
        """How many tokens may be generated, if the request says so."""
        return self.max_tokens

    def params(self) -> SamplingParams:
        """The request's way of sampling; raises InvalidRequest."""
        given: dict[str, Any] = {"max_tokens": self.limit()}
        given |= self._given("temperature", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")
        given |= self._given("ignore_eos", "n", "best_of")
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k  # both are in use for "off"
        if self.stop is not None:
            if not isinstance(self.stop, (str, list)):
                raise InvalidRequest(f"stop must be a string or a list of strings, got {brief(self.stop)}", param="stop")
            given["stop"] = self.stop
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        return SamplingParams(**given)

    def scheduling(self, tenant: str, headers: Mapping[str, str]) -> Scheduling:
        """The request's place among others, `tenant` being whose it is; what `headers` say the body may overrule. Raises InvalidRequest."""
        given: dict[str, Any] = {"tenant": tenant, "priority": TIERS[self.service_tier or "default"]}
        for name, header in (("deadline_ms", "x-request-deadline-ms"), ("ttft_deadline_ms", "x-request-ttft-deadline-ms")):
            if getattr(self, name) is None and header in headers:
                given[name] = _milliseconds(header, headers[header])
        return Scheduling(**given | self._given("priority", "deadline_ms", "ttft_deadline_ms", "cache_salt", "predicted_tokens"))

    def echo(self) -> dict[str, Any]:
        """What the answer repeats of the request: the tier that served it, if it asked for one."""
        if self.service_tier is None:
            return {}
        return {"service_tier": self.service_tier if TIERS[self.service_tier] else "default"}

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = None

    def params(self) -> SamplingParams:
        """As for any request, but the best answers are known only when all have ended."""
        params = super().params()
        if self.stream and params.ranked:
            raise InvalidRequest("best_of above n can't be streamed: leave out stream, or best_of", param="best_of")
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


class _Function(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def text(self, where: str) -> str:
        """The content as one text; raises InvalidRequest, naming the field as `where`."""
        match self.content:
            case str(text):
                return text
            case None if self.role == "assistant":
                return ""  # it only called tools
            case list(parts) if parts:
                return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(parts))
        raise InvalidRequest(f"{where} must be a string or a list of text parts, got {brief(self.content)}", param="messages")


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as a chat template wants them; raises InvalidRequest."""
        turns = []
        for i, message in enumerate(self.messages):
            turn = message.model_dump(exclude_none=True)
            # Templates know no developers: the role is OpenAI's newer word for system.
            turn["role"] = "system" if message.role == "developer" else message.role
            turn["content"] = message.text(f"messages[{i}].content")
            turns.append(turn)
        return turns

    def limit(self) -> int | None:
        """`max_completion_tokens` is the newer name of `max_tokens`, and wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def params(self) -> SamplingParams:
        """As for any request, but OpenAI's chats have no `best_of`."""
        if self.best_of not in (None, 1):
            raise InvalidRequest("best_of is for /v1/completions: leave it out, or ask for n answers", param="best_of")
        return super().params()


def _milliseconds(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_MS:
        message = f"{header} must be a number of milliseconds above 0 and at most {LONGEST_MS:g}, got {brief(text)}"
        raise InvalidRequest(message, param=header)
    return value


def _same(value: object, harmless: object) -> bool:
    return type(value) is type(harmless) and value == harmless


def _ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _part(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(f'{where} must be {{"type": "text", "text": "..."}}: only text is supported, got {brief(part)}', param="messages")


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first thing that is wrong, with the path of the field as a client writes it."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return InvalidRequest(f"{path} is missing", param=path)
    wanted = first["msg"].removeprefix("Input ").removeprefix("should be ")
    return InvalidRequest(f"{path} is not right: expected {wanted}, got {brief(first['input'])}", param=path)
