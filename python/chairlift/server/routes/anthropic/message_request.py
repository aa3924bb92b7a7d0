"""What /v1/messages takes: Anthropic's form of a conversation, made into a chat's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from chairlift.errors import InvalidRequest
from chairlift.server.chat.request import MAX_MESSAGES, MAX_TOOLS, ChatRequest, renamed
from chairlift.server.errors import brief
from chairlift.server.schema.fields import GenerationParams

_BLOCKS = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})]

RENAMED = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config"}
"""Fields of a chat request, as they are called here."""


class AnthropicMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True)
    role: Literal["user", "assistant"]
    content: _BLOCKS


class ClientTool(BaseModel):
    """A function that the model may call, and the client runs; there are no other tools here."""

    model_config = ConfigDict(strict=True)
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(BaseModel):
    """Whether the model must call a function, and which."""

    model_config = ConfigDict(strict=True)
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(strict=True)
    format: dict[str, Any] | None = None
    effort: str | None = None


class CountRequest(GenerationParams):
    """POST /v1/messages/count_tokens: a conversation."""

    unsupported = GenerationParams.unsupported | {"container": (), "mcp_servers": ([],)}
    idle = GenerationParams.idle | {"max_tokens", "inference_geo", "speed", "service_tier", "cache_control"}
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: _BLOCKS = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The chat request that asks for the same; raises InvalidRequest, with this one's names of fields."""
        try:
            return ChatRequest.read(self._body())[0]
        except InvalidRequest as error:
            raise renamed(error, RENAMED) from None

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = self.tuned()
        body |= {"model": self.model, "chat_template_kwargs": self.chat_template_kwargs, "messages": self._conversation()}
        if self.messages[-1].role == "assistant":  # the answer goes on with it
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            body["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        if choice := self.tool_choice:
            named = {"type": "function", "function": {"name": choice.name}}
            body["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            if choice.disable_parallel_tool_use:
                body["parallel_tool_calls"] = False
        if self.output_config and self.output_config.format:
            wanted = self.output_config.format
            schema = {"name": "answer", "schema": wanted.get("schema")}
            body["response_format"] = {"type": "json_schema", "json_schema": schema} if wanted.get("type") == "json_schema" else wanted
        return body

    def _conversation(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": _text(self.system, "system")}]
        messages: list[dict[str, Any]] = [message for message in system if message["content"]]
        for index, turn in enumerate(self.messages):
            where = f"messages[{index}].content"
            messages += _said(turn.content, where) if turn.role == "assistant" else _asked(turn.content, where)
        return messages


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None

    def _body(self) -> dict[str, Any]:
        return super()._body() | {"max_tokens": self.max_tokens, "stop": self.stop_sequences or None}


def _function(tool: ClientTool) -> dict[str, Any]:
    told = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **told, "parameters": tool.input_schema}


def _said(content: object, where: str) -> list[dict[str, Any]]:
    """The assistant's turn: text, and the calls after it."""
    if not isinstance(content, list):
        return [{"role": "assistant", "content": _text(content, where)}]
    texts, calls = [], []
    for index, block in enumerate(content):
        match block:
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": id, "type": "function", "function": function})
            case {"type": "thinking" | "redacted_thinking"}:
                pass  # what other models thought is not shown to this one
            case _:
                texts.append(_block(block, f"{where}[{index}]"))
    return [{"role": "assistant", "content": "\n".join(texts), **({"tool_calls": calls} if calls else {})}]


def _asked(content: object, where: str) -> list[dict[str, Any]]:
    """The user's turn: what tools gave back, then the text."""
    if not isinstance(content, list):
        return [{"role": "user", "content": _text(content, where)}]
    results, texts = [], []
    for index, block in enumerate(content):
        match block:
            case {"type": "tool_result", "tool_use_id": str(id)}:
                result = _text(block.get("content") or "", f"{where}[{index}].content")
                results.append({"role": "tool", "tool_call_id": id, "content": result})
            case _:
                texts.append(_block(block, f"{where}[{index}]"))
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])]


def _text(content: object, where: str) -> str:
    match content:
        case str(text):
            return text
        case [*blocks]:
            return "\n".join(_block(block, f"{where}[{index}]") for index, block in enumerate(blocks))
    raise InvalidRequest(f"{where} must be a string or a list of blocks, got {brief(content)}", param=where.partition("[")[0])


def _block(block: object, where: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    message = f'{where} must be {{"type": "text", "text": "..."}} here: images and documents are not supported, got {brief(block)}'
    raise InvalidRequest(message, param=where.partition("[")[0])
