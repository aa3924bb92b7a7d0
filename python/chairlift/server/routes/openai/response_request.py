"""The request of /v1/responses, converted to a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, Field, WithJsonSchema

from chairlift.errors import InvalidRequest, brief
from chairlift.server.chat.request import MAX_MESSAGES, MAX_TOOLS, ChatRequest, PromptCacheOptions, media_note, renamed_fields, text_of
from chairlift.server.schema.fields import GenerationParams, ServiceTier
from chairlift.server.schema.response_format import check_one_format

FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}
"""Names of chat fields in this API."""

_OF_SERVERS = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"),
        *("mcp_call", "mcp_approval_request", "mcp_approval_response", "tool_search_call", "tool_search_output"),
    )
)
"""Items of tools that another server ran in an earlier turn. They are left out."""

_LOGPROBS = "message.output_text.logprobs"


class ResponsesTool(BaseModel, strict=True, extra="allow"):
    """A function or a custom tool that the model may call; tools of other types are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None

    def response_tool(self) -> dict[str, Any]:
        """Converts to a response's tool. Its schema, which may be large, is not copied."""
        left_out = {"format", "tools"} if self.type == "function" else type(self).model_fields.keys() - self.model_fields_set
        return {name: value for name, value in self if name not in left_out}

    def chat_tools(self) -> list[dict[str, Any]]:
        """Converts to a chat request's tools."""
        fields = {"custom": {"name", "description", "format"}, "function": {"name", "description", "parameters", "strict"}}
        if self.type not in fields:
            return [{"type": self.type}]
        return [{"type": self.type, self.type: self.model_dump(include=fields[self.type], exclude_none=True)}]


class ToolOrNamespace(ResponsesTool):
    """A tool, or a namespace of tools: so Codex sends those of MCP servers."""

    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def response_tool(self) -> dict[str, Any]:
        """Converts to a response's tool."""
        tool = super().response_tool()
        return tool | {"tools": [one.response_tool() for one in tool["tools"]]} if tool.get("tools") else tool

    def chat_tools(self) -> list[dict[str, Any]]:
        """Converts to a chat request's tools: those of a namespace are one each, with both names."""
        if self.type != "namespace":
            return super().chat_tools()
        renamed = [tool.model_copy(update={"name": full_name(self.name, tool.name)}) for tool in self.tools or ()]
        return [one for tool in renamed for one in tool.chat_tools()]


class TextOptions(BaseModel, strict=True):
    """Options of the output text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(BaseModel, strict=True):
    """Options of the reasoning. The reasoning is returned in full, so `summary` has no effect."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(GenerationParams):
    """POST /v1/responses. The server stores nothing: the client sends the whole conversation each time."""

    unsupported = GenerationParams.unsupported | {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "truncation": ("disabled",),
    }
    without_effect = GenerationParams.without_effect | {"max_tool_calls", "stream_options"}
    input: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: int | None = None
    tools: Annotated[list[ToolOrNamespace], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    top_logprobs: int | None = None
    service_tier: ServiceTier | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return _LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    @cached_property
    def namespaces(self) -> dict[str | None, dict[str, str | None]]:
        """The fields `name` and `namespace` of calls of tools in namespaces, by the names that the model knows."""
        spaces = [tool for tool in self.tools or () if tool.type == "namespace"]
        inner = [(space.name, tool.name) for space in spaces for tool in space.tools or ()]
        return {full_name(space, name): {"name": name, "namespace": space} for space, name in inner}

    @cached_property
    def response_tools(self) -> list[dict[str, Any]]:
        """The tools as each event with the response repeats them."""
        return [tool.response_tool() for tool in self.tools or ()]

    def chat(self) -> ChatRequest:
        """Converts to a chat request; raises InvalidRequest with this API's field names."""
        body: dict[str, Any] = self.shared_fields()
        for name in ("model", "service_tier", "parallel_tool_calls", "chat_template_kwargs", "thinking_token_budget"):
            body[name] = getattr(self, name)
        if self.prompt_cache_options is not None:
            body["prompt_cache_options"] = self.prompt_cache_options.model_dump(exclude_none=True)
        body["messages"] = self._messages()
        body["max_completion_tokens"] = self.max_output_tokens
        if self.reasoning:
            body["reasoning_effort"] = self.reasoning.effort
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.tools:
            body["tools"] = [one for tool in self.tools for one in tool.chat_tools()]
        body["tool_choice"] = self._choice()
        if text_format := self.text and self.text.format:
            check_one_format(["response_format", "text.format"] if "response_format" in body else ["text.format"])
            body["response_format"] = _response_format(text_format)
        with renamed_fields(FIELD_NAMES):
            return ChatRequest.read(body)[0]

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not isinstance(self.input, list) or not self.input:
            raise InvalidRequest(f"input must be a string or a list of items, not empty, got {brief(self.input)}", param="input")
        if len(self.input) > MAX_MESSAGES:
            raise InvalidRequest(f"input has {len(self.input)} items, at most {MAX_MESSAGES} are allowed", param="input")
        for index, item in enumerate(self.input):
            _append_item(messages, item, f"input[{index}]")
        for message in messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(filter(None, message["reasoning_content"]))
        # Reasoning without an answer has no message to belong to.
        return [message for message in messages if not _is_reasoning(message)]

    def _choice(self) -> Any:
        match self.tool_choice:
            case {"type": "function" | "custom" as kind, "name": str(name), **more}:
                return {"type": kind, kind: {"name": full_name(more.get("namespace"), name)}}
            case {"type": "allowed_tools", "mode": str(mode), "tools": [*tools]}:
                given = [tool for tool in tools if isinstance(tool, dict)]
                names = [full_name(tool.get("namespace"), tool.get("name")) for tool in given]
                allowed = [{"type": "function", "function": {"name": name}} for name in names]
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        return self.tool_choice


def full_name(namespace: object, name: str | None) -> str | None:
    """Returns the name under which the model knows a tool of a namespace, as in Codex: `mcp__server__tool`."""
    if name is None or not isinstance(namespace, str):
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def _response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    """Converts `text.format` to `response_format`, which nests a schema one level deeper."""
    if text_format.get("type") != "json_schema":
        return text_format
    return {"type": "json_schema", "json_schema": {name: value for name, value in text_format.items() if name != "type"}}


def _append_item(messages: list[dict[str, Any]], item: object, where: str) -> None:
    """Appends an input item to the conversation; raises InvalidRequest that names it as `where`."""
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), **more} if _are_arguments(more.get("arguments")):
            function = {"name": full_name(more.get("namespace"), name), "arguments": more.get("arguments")}
            _append_call(messages, {"id": call_id, "type": "function", "function": function})
        case {"type": "custom_tool_call", "call_id": str(call_id), "name": str(name), "input": str(text), **more}:
            custom = {"name": full_name(more.get("namespace"), name), "input": text}
            _append_call(messages, {"id": call_id, "type": "custom", "custom": custom})
        case {"type": "function_call_output" | "custom_tool_call_output", "call_id": str(call_id), **more}:
            output = more.get("output")
            result = "" if output is None else text_of(output, f"{where}.output", _result_part)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        case {"type": str(kind)} if kind in _OF_SERVERS:
            pass
        case {"type": "item_reference"}:
            message = f"{where} refers to an item, but this server stores none: send the item itself, as clients do with store false"
            raise InvalidRequest(message, param="input")
        case {"type": "reasoning", **parts}:
            # The reasoning belongs to the message or the calls that follow it. There may be thousands of parts: they are joined at the end.
            if not messages or not _is_reasoning(messages[-1]):
                messages.append({"role": "assistant", "reasoning_content": []})
            messages[-1]["reasoning_content"].append(_reasoning(parts, where))
        case {"role": "user" | "assistant" | "system" | "developer" as role, **rest} if rest.get("type", "message") == "message":
            if role != "assistant" or not messages or not _is_reasoning(messages[-1]):
                messages.append({"role": role})
            content = rest.get("content")
            messages[-1]["content"] = "" if content is None and role == "assistant" else text_of(content, f"{where}.content", _part)
        case _:
            message = f"{where} must be a message, a call of a function or custom tool, its output, or a reasoning item, got {brief(item)}"
            raise InvalidRequest(message, param="input")


def _is_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether a message is only reasoning so far."""
    return message.keys() == {"role", "reasoning_content"}


def _append_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Appends a call to the assistant's last message, or to a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    messages[-1].setdefault("content", None)
    messages[-1].setdefault("tool_calls", []).append(call)


def _are_arguments(value: object) -> bool:
    """Whether a call may have these arguments: JSON text, an object, or nothing, which PHP writes as an empty list."""
    return value is None or isinstance(value, str | dict) or value == []


def _reasoning(item: Mapping[Any, object], where: str) -> str:
    """Returns the text of a reasoning item: its content, else its summary. Encrypted reasoning of other servers has none."""
    for name in ("content", "summary"):
        match item.get(name):
            case [_, *_] as parts:
                return "\n".join(_part(part, f"{where}.{name}[{index}]") for index, part in enumerate(parts))
    return ""


def _part(part: object, where: str) -> str:
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text", "text": str(text)}:
            return text
    raise InvalidRequest(f"{where} must be text (input_text or output_text), got {brief(part)}", param="input")


def _result_part(part: object, where: str) -> str:
    """Returns a part of a tool's output as text: a note on what the model cannot read."""
    match part:
        case {"type": "input_image" | "input_file" as kind}:
            return media_note(kind.removeprefix("input_"))
    return _part(part, where)
