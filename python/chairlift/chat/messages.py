"""Messages of a conversation, and further inputs of the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from chairlift.chat.tools.custom import INPUT
from chairlift.errors import InvalidRequest, brief
from chairlift.grammar.json_schema import MAX_DEPTH

MAX_CALLS = 128

_RESERVED = frozenset(
    (
        *("messages", "conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "controls", "self"),
    )
)
"""Names that `chat_template_kwargs` may not set: they have fields of their own or are arguments of the renderer."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]}
"""A content part in /openapi.json."""


class _CalledFunction(BaseModel, strict=True):
    name: str
    arguments: str | dict[str, Any] | Annotated[list[Any], Field(max_length=0)] | None = None


class _CalledCustomTool(BaseModel, strict=True):
    name: str
    input: str


class _MessageToolCall(BaseModel, strict=True):
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: _CalledFunction | None = None
    custom: _CalledCustomTool | None = None

    def called(self, where: str) -> _CalledFunction:
        """Returns the called function; raises InvalidRequest that names the call as `where`."""
        if self.type == "custom" and self.custom is not None:
            return _CalledFunction(name=self.custom.name, arguments={INPUT: self.custom.input})
        if self.function is None:
            raise InvalidRequest(f"{where}.{self.type} is missing", param=f"{where}.{self.type}")
        return self.function


class Message(BaseModel, strict=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]})] = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[_MessageToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: _CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    prefix: bool | None = None
    """Whether the answer goes on with this message, which is the last: the field of Mistral's and DeepSeek's APIs."""

    def for_template(self, where: str) -> dict[str, Any]:
        """Converts the message for a chat template; raises InvalidRequest that names the message as `where`."""
        # Templates do not know OpenAI's newer role `developer` and its older role `function`.
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": self._text(f"{where}.content")}
        calls = self.tool_calls or ([_MessageToolCall(function=self.function_call)] if self.function_call else [])
        if calls:
            message["tool_calls"] = [_call_for_template(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        if self.role == "assistant" and (reasoning := self.reasoning_content or self.reasoning):
            # Templates differ in the name that they read; that of gpt-oss is `thinking`.
            message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message

    def _text(self, where: str) -> str:
        match self.content:
            case str(text):
                return text
            case None | [] if self.role == "assistant":
                return self.refusal or ""  # it called tools or refused
            case None | [] if self.role in ("tool", "function"):
                return ""  # the tool returned nothing
            case list(parts) if parts:
                return "\n".join(self._part(part, f"{where}[{i}]") for i, part in enumerate(parts))
        raise InvalidRequest(f"{where} must be a string or a list of text parts, got {brief(self.content)}", param="messages")

    def _part(self, part: object, where: str) -> str:
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str(text)} | str(text):  # Responses' names too
                return text
            case {"type": "refusal", "refusal": str(text)} if self.role == "assistant":
                return text
        raise InvalidRequest(
            f'{where} must be {{"type": "text", "text": "..."}}: only text is supported, got {brief(part)}', param="messages"
        )


def _call_for_template(call: _MessageToolCall, where: str) -> dict[str, Any]:
    """Converts a tool call for a chat template, which expects arguments as an object if they are one.

    Clients send back a call without arguments as an empty text, as null or, in PHP, as an empty list, and each of these as JSON text.
    """
    function = call.called(where)
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments.strip() or "{}")
        except (ValueError, RecursionError):  # arguments that a model wrote may be invalid JSON
            parsed = arguments
        if parsed in (None, [], "") or isinstance(parsed, dict):
            arguments = parsed or {}
    check_depth("messages", arguments)
    id_field = {} if call.id is None else {"id": call.id}
    return {**id_field, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def checked_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a caller's `chat_template_kwargs`; raises InvalidRequest for names that the renderer sets itself."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"chat_template_kwargs must be a dict, got {brief(given)}", param="chat_template_kwargs")
    for name in given:
        if not isinstance(name, str) or name in _RESERVED or not _VARIABLE.fullmatch(name):
            raise InvalidRequest(f"chat_template_kwargs may not set {brief(name)}", param="chat_template_kwargs")
    check_depth("chat_template_kwargs", dict(given))
    return dict(given)


def check_depth(param: str, value: Any) -> None:
    """Raises InvalidRequest if `value` is nested too deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise InvalidRequest(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
