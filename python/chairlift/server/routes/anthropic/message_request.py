"""The request of /v1/messages, converted to a chat request."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from chairlift.errors import InvalidRequest, brief
from chairlift.server.chat.request import MAX_ID, MAX_MESSAGES, MAX_TOOLS, ChatRequest, media_note, renamed_fields, text_of
from chairlift.server.schema.fields import GenerationParams
from chairlift.server.schema.response_format import check_one_format

_BLOCKS = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})]

FIELD_NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
FIELD_NAMES |= {"response_format": "output_config", "reasoning_effort": "output_config", "thinking_token_budget": "thinking"}
"""Names of chat fields in this API."""

_OF_SERVERS = ("server_tool_use", "mcp_tool_use", "_tool_result")
"""How the types of blocks of tools end that Anthropic's servers ran."""

_BILLING = "x-anthropic-billing-header:"
"""Begins the block with which Claude Code begins its system prompt. It differs in each request, so the prefix cache would never hit."""


class AnthropicMessage(BaseModel, strict=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: _BLOCKS


class ClientTool(BaseModel, strict=True):
    """A function that the model may call and the client runs; tools of other types are left out."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(BaseModel, strict=True):
    """Whether the model must call a function, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(BaseModel, strict=True):
    """Structured output; `output_format` is the older name of its `format`."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class ThinkingOptions(BaseModel, strict=True):
    """Whether the model reasons, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: str | None = None


class CountRequest(GenerationParams):
    """POST /v1/messages/count_tokens."""

    unsupported = GenerationParams.unsupported | {"container": (), "mcp_servers": ([],)}
    without_effect = GenerationParams.without_effect | {"max_tokens", "inference_geo", "speed", "service_tier", "cache_control"}
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: _BLOCKS = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    thinking: ThinkingOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """Converts to a chat request; raises InvalidRequest with this API's field names."""
        with renamed_fields(FIELD_NAMES):
            return ChatRequest.read(self._body())[0]

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = self.shared_fields()
        body |= {"model": self.model, "chat_template_kwargs": self.chat_template_kwargs, "messages": self._conversation()}
        if self.messages[-1].role == "assistant":  # the answer continues it
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)]
        if choice := self.tool_choice:
            named = {"type": "function", "function": {"name": choice.name}}
            body["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            if choice.disable_parallel_tool_use:
                body["parallel_tool_calls"] = False
        if self.thinking:
            body["enable_thinking"] = self.thinking.type != "disabled"
            if self.thinking.type == "enabled":
                body["thinking_token_budget"] = self.thinking.budget_tokens
        if self.output_config:
            body["reasoning_effort"] = self.output_config.effort
        newer = None if self.output_config is None else self.output_config.format
        formats = {"response_format": body.get("response_format"), "output_config.format": newer, "output_format": self.output_format}
        given = [name for name, value in formats.items() if value]
        check_one_format(given[:2])
        if output_format := newer or self.output_format:
            if output_format.get("type") == "json_schema":
                output_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": output_format.get("schema")}}
            body["response_format"] = output_format
        return body

    def _conversation(self) -> list[dict[str, Any]]:
        """Returns the messages. System turns at the beginning belong to the system prompt; later ones join the user's turn beside them.

        Many chat templates refuse a system message after the first turn. The text stays in its place, so the prefix cache still hits.
        """
        turns = [(message, f"messages[{index}].content") for index, message in enumerate(self.messages)]
        leading = list(itertools.takewhile(lambda turn: turn[0].role == "system", turns))
        if len(leading) == len(turns):
            raise InvalidRequest("messages has only system turns: add one of the user", param="messages")
        given = [] if self.system is None else [(self.system, "system")]
        given += [(message.content, where) for message, where in leading]
        texts = [text_of(content, where, _block) for content, where in given]
        if given:
            texts[0] = _without_billing(given[0][0], texts[0])
        system = "\n".join(filter(None, texts))
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        reminders: list[str] = []
        for message, where in turns[len(leading) :]:
            if message.role == "system":
                # Claude Code marks what is not the user's in this way.
                reminders.append(f"<system-reminder>\n{text_of(message.content, where, _block)}\n</system-reminder>")
                continue
            _join_reminders(messages, reminders)
            if message.role == "user":
                messages += _user_messages(message.content, where)
                messages[-1]["content"] = "\n".join((*reminders, messages[-1]["content"]))
            else:
                messages += _reminder_turn(reminders)
                messages.append(_assistant_message(message.content, where))
            reminders.clear()
        _join_reminders(messages, reminders)
        return messages + _reminder_turn(reminders)


class Diagnostics(BaseModel, strict=True):
    """Asks for a comparison with an earlier message; without its id only for the field in the response."""

    previous_message_id: Annotated[str, Field(max_length=MAX_ID)] | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] | None = None
    diagnostics: Diagnostics | None = None

    def _body(self) -> dict[str, Any]:
        body = super()._body() | {"max_tokens": self.max_tokens, "stop": self.stop_sequences or None}
        if self.diagnostics is not None:
            body["prompt_cache_options"] = {"comparison_response_id": self.diagnostics.previous_message_id}
        return body


def _tool(tool: ClientTool, where: str) -> dict[str, Any]:
    """Converts to a chat request's tool; raises InvalidRequest that names it as `where`."""
    if tool.type not in (None, "custom"):
        return {"type": tool.type}
    for field, value in (("name", tool.name), ("input_schema", tool.input_schema)):
        if value is None:
            raise InvalidRequest(f"{where}.{field} is missing", param=f"{where}.{field}")
    more = tool.model_dump(include={"description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {"name": tool.name, **more, "parameters": tool.input_schema}}


def _assistant_message(content: object, where: str) -> dict[str, Any]:
    """Converts an assistant message: reasoning, text, then its tool calls."""
    if not isinstance(content, list):
        return {"role": "assistant", "content": text_of(content, where, _block)}
    reasoning: list[str] = []
    texts, calls = [], []
    for index, block in enumerate(content):
        match block:
            case {"type": "tool_use"}:
                calls.append(_called(block, f"{where}[{index}]"))
            case {"type": "thinking", "thinking": str(text)}:
                reasoning.append(text)
            case {"type": str(kind)} if kind == "redacted_thinking" or kind.endswith(_OF_SERVERS):
                pass  # only its author can read it, and the results of its own tools
            case _:
                texts.append(_block(block, f"{where}[{index}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    return message | ({"tool_calls": calls} if calls else {})


def _called(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Converts a call that the model made earlier; raises InvalidRequest that names it as `where`."""
    given = block.get("input") or {}
    if not isinstance(given, dict | str):
        raise InvalidRequest(f"{where}.input must be an object, got {brief(given)}", param="messages")
    name = _string(block, "name", where)
    return {"id": _string(block, "id", where), "type": "function", "function": {"name": name, "arguments": given}}


def _string(block: Mapping[str, Any], field: str, where: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{field} must be a string, got {brief(value)}", param="messages")
    return value


def _user_messages(content: object, where: str) -> list[dict[str, Any]]:
    """Converts a user message: tool results, then the text."""
    if not isinstance(content, list):
        return [{"role": "user", "content": text_of(content, where, _block)}]
    results, texts = [], []
    for index, block in enumerate(content):
        match block:
            case {"type": "tool_result"}:
                id = _string(block, "tool_use_id", f"{where}[{index}]")
                result = text_of(block.get("content") or "", f"{where}[{index}].content", _result_block)
                if block.get("is_error") is True:
                    result = f"Error: {result}" if result else "Error"
                results.append({"role": "tool", "tool_call_id": id, "content": result})
            case _:
                texts.append(_block(block, f"{where}[{index}]"))
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])]


def _result_block(block: object, where: str) -> str:
    """Returns a block of a tool's result as text: a note on what the model cannot read."""
    match block:
        case {"type": "image" as kind} | {"type": "document" as kind, "source": {"type": "base64" | "url" | "file"}}:
            return media_note(kind)
    return _block(block, where)


def _join_reminders(messages: list[dict[str, Any]], reminders: list[str]) -> None:
    """Adds system turns to the user's turn before them, all at once: there may be thousands after a long one."""
    if reminders and messages[-1]["role"] in ("user", "tool"):
        messages[-1]["content"] = "\n".join((messages[-1]["content"], *reminders)).lstrip("\n")
        reminders.clear()


def _reminder_turn(reminders: list[str]) -> list[dict[str, Any]]:
    """Returns a user message for system turns that no user's turn follows, if there are any."""
    return [{"role": "user", "content": "\n".join(reminders)}] if reminders else []


def _without_billing(content: object, text: str) -> str:
    """Returns the `text` of `content` without a first block of billing. In a string, where blocks have no end, only a first line counts."""
    match content:
        case [{"text": str(first)}, *_] if _is_billing(first):
            return text.removeprefix(first).removeprefix("\n")
        case str() if _is_billing(text):
            return text.lstrip().partition("\n")[2].lstrip("\n") or text
    return text


def _is_billing(text: str) -> bool:
    return text.lstrip()[: len(_BILLING)].lower() == _BILLING


def _block(block: object, where: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "document", "source": {"type": "text", "data": str(text)}, **about}:
            return _titled(about, text)
        case {"type": "document", "source": {"type": "content", "content": content}, **about}:
            return _titled(about, text_of(content, where, _block))
        case {"type": "search_result", "content": content, **about}:
            return _titled(about, text_of(content, where, _block))
        case {"type": "tool_reference", "tool_name": str(name)}:  # the client found a tool that the request has
            return name
    message = (
        f'{where} must be {{"type": "text", "text": "..."}} here: images, files and other blocks are not supported, got {brief(block)}'
    )
    raise InvalidRequest(message, param=where.partition("[")[0])


def _titled(about: Mapping[Any, object], text: str) -> str:
    """Returns a text below what its block says about it: a document's title and context, or a search result's title and source."""
    heading = [about.get(name) for name in ("title", "source", "context")]
    return "\n".join([*(line for line in heading if isinstance(line, str) and line), text])
