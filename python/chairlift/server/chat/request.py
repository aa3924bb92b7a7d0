"""A conversation as chat clients send it: messages, the functions that may be called, and what else the chat template is given."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from chairlift.errors import InvalidRequest
from chairlift.sampling import SamplingParams
from chairlift.server.errors import brief
from chairlift.server.schema.fields import GenerationRequest
from chairlift.server.schema.response_format import MAX_DEPTH

MAX_TOOLS = 128
MAX_MESSAGES = 4096
MAX_CALLS = 128
MAX_DOCUMENTS = 256
MAX_VARIABLES = 64

_RESERVED = frozenset(
    (
        *("messages", "conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "controls", "self"),
    )
)
"""What `chat_template_kwargs` may not set: fields of their own, and arguments of the calls that templates go through."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]}
"""A piece of a message's content, as /openapi.json tells of it."""


class Function(BaseModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    model_config = ConfigDict(strict=True)
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool, of which functions are the only kind here."""

    model_config = ConfigDict(strict=True)
    type: Literal["function"]
    function: Function


class _CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    arguments: str | dict[str, Any] = "{}"


class _Called(BaseModel):
    model_config = ConfigDict(strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]})] = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[_Called], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: _CalledFunction | None = None

    def turn(self, where: str) -> dict[str, Any]:
        """The message as a chat template wants it; raises InvalidRequest, naming the message as `where`."""
        # Templates know neither developers nor functions: OpenAI's newer word for system, and its older one for tool.
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        turn: dict[str, Any] = {"role": role, "content": self._text(f"{where}.content")}
        called = self.tool_calls or ([_Called(function=self.function_call)] if self.function_call else [])
        if called:
            turn["tool_calls"] = [_as_told(one) for one in called]
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                turn[name] = value
        return turn

    def _text(self, where: str) -> str:
        match self.content:
            case str(text):
                return text
            case None if self.role == "assistant":
                return self.refusal or ""  # it only called tools, or refused
            case list(parts) if parts:
                return "\n".join(self._part(part, f"{where}[{i}]") for i, part in enumerate(parts))
        raise InvalidRequest(f"{where} must be a string or a list of text parts, got {brief(self.content)}", param="messages")

    def _part(self, part: object, where: str) -> str:
        kinds = ("text", "refusal") if self.role == "assistant" else ("text",)
        if isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get(part["type"]), str):
            return str(part[part["type"]])
        raise InvalidRequest(
            f'{where} must be {{"type": "text", "text": "..."}}: only text is supported, got {brief(part)}', param="messages"
        )


def _as_told(called: _Called) -> dict[str, Any]:
    """A call in the conversation as templates want it: with arguments as an object, if they are one."""
    arguments = called.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):  # what a model wrote need not be JSON
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    _check_depth("messages", arguments)
    named = {} if called.id is None else {"id": called.id}
    return {**named, "type": "function", "function": {"name": called.function.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that the model may call in its turn."""

    tools: tuple[Tool, ...] = ()
    must: bool = False
    """It has to call one."""
    named: bool = False
    """The client said which."""
    several: bool = True
    """It may call more than one."""

    def __bool__(self) -> bool:
        return bool(self.tools)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions, and what other routes make of theirs."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    function_call: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None

    @property
    def legacy(self) -> bool:
        """Whether the client speaks of functions, as was the custom before tools."""
        return bool(self.functions)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as a chat template wants them; raises InvalidRequest."""
        return [message.turn(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def variables(self) -> dict[str, Any]:
        """What the chat template is given beside messages and tools; raises InvalidRequest."""
        given = dict(self.chat_template_kwargs or {})
        for name in given:
            if name in _RESERVED or not _VARIABLE.fullmatch(name):
                raise InvalidRequest(f"chat_template_kwargs may not set {brief(name)}", param="chat_template_kwargs")
        _check_depth("chat_template_kwargs", given)
        if self.documents:
            _check_depth("documents", self.documents)
            given["documents"] = self.documents
        if self.continue_final_message:
            if self.add_generation_prompt:
                message = "continue_final_message goes on with the last message, add_generation_prompt begins one: leave out either"
                raise InvalidRequest(message, param="continue_final_message")
            given["continue_final_message"] = True
        if self.continue_final_message or self.add_generation_prompt is False:
            given["add_generation_prompt"] = False
        return given

    def offer(self) -> Offer:
        """The functions that may be called; raises InvalidRequest."""
        if self.legacy:
            if self.tools:
                raise InvalidRequest("functions is the older name of tools: send one of them", param="functions")
            tools = [Tool(type="function", function=function) for function in self.functions or ()]
        else:
            tools = self.tools or []
        param = "functions" if self.legacy else "tools"
        offered = {tool.function.name: tool for tool in tools}
        if len(offered) < len(tools):
            raise InvalidRequest(f"{param} has two functions of one name: give each its own", param=param)
        _check_depth(param, [tool.function.parameters for tool in tools])
        mode, names = self._choice()
        for name in names or ():
            if name not in offered:
                raise InvalidRequest(f"{self._chooser} names {brief(name)}, which is not among the {param}", param=self._chooser)
        if mode == "required" and not offered:
            raise InvalidRequest(f"{self._chooser} asks for a call, but there are no {param}", param=self._chooser)
        chosen = () if mode == "none" else tuple(offered.values() if names is None else (offered[name] for name in dict.fromkeys(names)))
        named = mode == "named"
        return Offer(chosen, mode in ("required", "named"), named, not (self.legacy or named or self.parallel_tool_calls is False))

    @property
    def _chooser(self) -> str:
        return "function_call" if self.function_call is not None and self.tool_choice is None else "tool_choice"

    def _choice(self) -> tuple[str, list[str] | None]:
        """How the model chooses (`none`, `auto`, `required`, `named`), and among which functions, None for all."""
        choice = self.function_call if self._chooser == "function_call" else self.tool_choice
        match choice:
            case None:
                return "auto", None
            case "none" | "auto" | "required" if self._chooser == "tool_choice" or choice != "required":
                return str(choice), None
            case {"type": "function", "function": {"name": str(name)}} if self._chooser == "tool_choice":
                return "named", [name]
            case {"name": str(name)} if self._chooser == "function_call":
                return "named", [name]
            case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed}}:
                names = [_name(one) for one in allowed]
                if None not in names:
                    return str(mode), [str(name) for name in names]
        message = f"{self._chooser} must be none, auto, required or the name of a function in OpenAI's form, got {brief(choice)}"
        raise InvalidRequest(message, param=self._chooser)

    def limit(self) -> int | None:
        """`max_completion_tokens` is the newer name of `max_tokens`, and wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def likeliest(self) -> int | None:
        """OpenAI's chats say in two fields whether, and how many."""
        if self.top_logprobs is not None and not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs needs logprobs: send true for it", param="top_logprobs")
            return None
        return (self.top_logprobs or 0) if self.logprobs else None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """As for any request, but OpenAI's chats have no `best_of`, and none of their chunks has a place for the prompt."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs of a chat can't be streamed: leave out stream, or prompt_logprobs", param="prompt_logprobs"
            )
        if self.best_of not in (None, 1):
            raise InvalidRequest("best_of is for /v1/completions: leave it out, or ask for n answers", param="best_of")
        try:
            return super().params(defaults)
        except InvalidRequest as error:
            names = {"logprobs": "top_logprobs"}
            if self.max_completion_tokens is not None:
                names["max_tokens"] = "max_completion_tokens"
            raise renamed(error, names) from None


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """A chat request's error as one of an API that is made into chats, where some of its fields have other `names`."""
    name = (error.param or "").partition("[")[0].partition(".")[0]
    if name not in names:
        return error
    return InvalidRequest(str(error).replace(name, names[name]), param=names[name], code=error.code)


def _name(tool: object) -> str | None:
    """The function that one of `allowed_tools` names."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


def _check_depth(param: str, value: Any) -> None:
    """Raises InvalidRequest if `value` is nested too deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise InvalidRequest(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
