"""The request of chat APIs: messages, tools, and further inputs of the chat template."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from chairlift.errors import InvalidRequest
from chairlift.sampling import SamplingParams
from chairlift.server.chat.tools.custom import INPUT, PARAMETERS
from chairlift.server.errors import brief
from chairlift.server.schema.fields import GenerationRequest
from chairlift.server.schema.json_schema import MAX_DEPTH

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
"""Names that `chat_template_kwargs` may not set: they have fields of their own or are arguments of the renderer."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"

_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]}
"""A content part in /openapi.json."""


_NO_PARAMETERS = {"type": "object", "properties": {}}
_CONSTRAINTS = (
    *("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "enum", "const"),
    *("required", "dependentRequired", "dependentSchemas", "dependencies", "minProperties", "patternProperties", "propertyNames"),
)
"""Keywords that may require or allow properties which are not among `properties`."""


class Function(BaseModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments, None if it takes none."""

    model_config = ConfigDict(strict=True)
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the function for a chat template; templates expect `parameters`, and some fail without."""
        parameters = _NO_PARAMETERS if self.parameters is None else self.parameters
        return {**self.model_dump(exclude_unset=True, exclude={"strict"}), "parameters": parameters}

    def arguments_schema(self) -> dict[str, Any]:
        """Returns the JSON schema for calls: without properties, the only valid arguments are `{}` unless the schema says more."""
        schema = _NO_PARAMETERS if self.parameters is None else self.parameters
        bare = schema.get("properties") == {} and not any(schema.get(name) for name in _CONSTRAINTS)
        return {"additionalProperties": False, **schema} if bare else schema


class TextFormat(BaseModel):
    """The form of a custom tool's input. The model sees a grammar, but the input may not match it."""

    model_config = ConfigDict(strict=True)
    type: str = "text"
    grammar: dict[str, Any] | None = None
    syntax: str | None = None
    definition: str | None = None


class CustomTool(BaseModel):
    """A tool whose input is free text."""

    model_config = ConfigDict(strict=True)
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    format: TextFormat | None = None

    def as_function(self) -> Function:
        """Returns the function that stands for the tool."""
        description = self.description or ""
        if self.format is not None and self.format.type == "grammar":
            grammar = self.format.grammar or {"syntax": self.format.syntax, "definition": self.format.definition}
            description += f"\nThe input must match this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
        return Function(name=self.name, description=description.strip(), parameters=PARAMETERS)


class Tool(BaseModel):
    """A tool. Functions and custom tools are supported; tools of other types are left out."""

    model_config = ConfigDict(strict=True)
    type: str
    function: Function | None = None
    custom: CustomTool | None = None

    @property
    def left_out(self) -> bool:
        """Whether the server does not know this type of tool."""
        return self.type not in ("function", "custom")

    def as_function(self, where: str) -> Function:
        """Returns the function, or the one that stands for the custom tool; raises InvalidRequest that names the tool as `where`."""
        if self.type == "function" and self.function is not None:
            return self.function
        if self.type == "custom" and self.custom is not None:
            return self.custom.as_function()
        raise InvalidRequest(f"{where}.{self.type} is missing", param=f"{where}.{self.type}")


class _CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    arguments: str | dict[str, Any] | Annotated[list[Any], Field(max_length=0)] | None = None


class _CalledCustomTool(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    input: str


class _MessageToolCall(BaseModel):
    model_config = ConfigDict(strict=True)
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


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]})] = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[_MessageToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: _CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

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
        kinds = ("text", "refusal") if self.role == "assistant" else ("text",)
        if isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get(part["type"]), str):
            return str(part[part["type"]])
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
    _check_depth("messages", arguments)
    id_field = {} if call.id is None else {"id": call.id}
    return {**id_field, "type": "function", "function": {"name": function.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The tools of a request and how the model may use them."""

    tools: tuple[Function, ...] = ()
    custom: frozenset[str] = frozenset()
    """Names of those that stand for custom tools."""
    required: bool = False
    """The model must call a tool."""
    named: bool = False
    """The client chose the tool to call."""
    parallel: bool = True
    """The model may make more than one call."""

    def __bool__(self) -> bool:
        return bool(self.tools)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions; other chat APIs convert their requests to it."""

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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    include_reasoning: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None

    @property
    def legacy(self) -> bool:
        """Whether the client uses `functions`, the predecessor of `tools`."""
        return bool(self.functions)

    def conversation(self) -> list[dict[str, Any]]:
        """Converts the messages for a chat template; raises InvalidRequest."""
        return [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def variables(self) -> dict[str, Any]:
        """Returns the chat template's inputs other than messages and tools; raises InvalidRequest."""
        variables = dict(self.chat_template_kwargs or {})
        for name in variables:
            if name in _RESERVED or not _VARIABLE.fullmatch(name):
                raise InvalidRequest(f"chat_template_kwargs may not set {brief(name)}", param="chat_template_kwargs")
        _check_depth("chat_template_kwargs", variables)
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        if (thinking := self._thinking()) is not None:
            for name in ("enable_thinking", "thinking"):  # Qwen's name and that of Granite and DeepSeek
                variables.setdefault(name, thinking)
        if self.documents:
            _check_depth("documents", self.documents)
            variables["documents"] = self.documents
        if self.continue_final_message:
            if self.add_generation_prompt:
                message = "continue_final_message extends the last message, add_generation_prompt begins a new one: leave out one of them"
                raise InvalidRequest(message, param="continue_final_message")
            variables["continue_final_message"] = True
        if self.continue_final_message or self.add_generation_prompt is False:
            variables["add_generation_prompt"] = False
        return variables

    def _thinking(self) -> bool | None:
        """Returns whether the model should reason; None leaves it to the chat template."""
        if self.enable_thinking is not None or self.reasoning_effort is None:
            return self.enable_thinking
        return self.reasoning_effort != "none"

    def thinking_budget(self) -> int | None:
        """Returns the maximum number of reasoning tokens; None for no limit."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def tool_spec(self) -> ToolSpec:
        """Returns the tools that may be called; raises InvalidRequest."""
        if self.legacy:
            if self.tools:
                raise InvalidRequest("functions is the older name of tools: send one of them", param="functions")
            tools = self.functions or []
        else:
            tools = [tool.as_function(f"tools[{i}]") for i, tool in enumerate(self.tools or ()) if not tool.left_out]
        param = "functions" if self.legacy else "tools"
        by_name = {tool.name: tool for tool in tools}
        if len(by_name) < len(tools):
            raise InvalidRequest(f"{param} has two functions of one name: give each its own", param=param)
        _check_depth(param, [tool.parameters for tool in tools])
        mode, names = self._tool_choice()
        for name in names or ():
            if name not in by_name:
                raise InvalidRequest(f"{self._choice_field} names {brief(name)}, which is not among the {param}", param=self._choice_field)
        if mode == "required" and not by_name:
            raise InvalidRequest(f"{self._choice_field} asks for a call, but there are no {param}", param=self._choice_field)
        chosen = () if mode == "none" else tuple(by_name.values() if names is None else (by_name[name] for name in dict.fromkeys(names)))
        named = mode == "named"
        custom = frozenset(tool.custom.name for tool in self.tools or () if tool.custom is not None)
        parallel = not (self.legacy or named or self.parallel_tool_calls is False)
        return ToolSpec(chosen, custom, mode in ("required", "named"), named, parallel)

    def left_out_tools(self) -> list[str]:
        """Returns the types of the tools that the server does not know."""
        return list(dict.fromkeys(tool.type for tool in self.tools or () if tool.left_out))

    @property
    def _choice_field(self) -> str:
        return "function_call" if self.function_call is not None and self.tool_choice is None else "tool_choice"

    def _tool_choice(self) -> tuple[str, list[str] | None]:
        """Returns how the model chooses (`none`, `auto`, `required`, `named`), and the names of the functions to choose from (None.

        All).
        """
        choice = self.function_call if self._choice_field == "function_call" else self.tool_choice
        match choice:
            case None:
                return "auto", None
            case "none" | "auto" | "required" if self._choice_field == "tool_choice" or choice != "required":
                return str(choice), None
            case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}} if (
                self._choice_field == "tool_choice"
            ):
                return "named", [name]
            case {"name": str(name)} if self._choice_field == "function_call":
                return "named", [name]
            case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed}}:
                names = [_function_name(tool) for tool in allowed]
                if None not in names:
                    return str(mode), [str(name) for name in names]
        message = f"{self._choice_field} must be none, auto, required or the name of a function in OpenAI's format, got {brief(choice)}"
        raise InvalidRequest(message, param=self._choice_field)

    def token_limit(self) -> int | None:
        """Returns `max_completion_tokens`, or its older name `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        """Combines `logprobs` and `top_logprobs`."""
        if self.top_logprobs is not None and not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs needs logprobs: send true for it", param="top_logprobs")
            return None
        return (self.top_logprobs or 0) if self.logprobs else None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns the sampling parameters; chats have no `best_of`, and their streams have no field for the prompt's log-probabilities."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                "prompt_logprobs of a chat cannot be streamed: leave out stream, or prompt_logprobs", param="prompt_logprobs"
            )
        if self.best_of not in (None, 1):
            raise InvalidRequest("best_of is for /v1/completions: leave it out, or ask for n answers", param="best_of")
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        with renamed_fields(names):
            return super().params(defaults)


@contextlib.contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the chat fields in an InvalidRequest to the `names` of the API that the client used."""
    try:
        yield
    except InvalidRequest as error:
        name = (error.param or "").partition("[")[0].partition(".")[0]
        if name not in names:
            raise
        error.args, error.param = (str(error).replace(name, names[name]),), names[name]
        raise


def _function_name(tool: object) -> str | None:
    """Returns the function that an entry of `allowed_tools` names."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return name
    return None


def _check_depth(param: str, value: Any) -> None:
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
