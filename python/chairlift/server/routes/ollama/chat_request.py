"""The requests of /api/chat and /api/generate, converted to chat requests."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field

from chairlift.errors import InvalidRequest, brief
from chairlift.server.chat.request import MAX_MESSAGES, MAX_TOOLS, ChatRequest, renamed_fields
from chairlift.server.routes.ollama.fields import KeepAlive, served_name
from chairlift.server.schema.fields import Fields

_OPTIONS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_completion_tokens",
}
"""Options, with the names of the chat fields."""
_INTEGERS = frozenset(("top_k", "seed", "num_predict"))
"""Options without a fraction, of which Ollama drops one."""
FIELD_NAMES = {chat_name: f"options.{name}" for name, chat_name in _OPTIONS.items()}
"""Names of chat fields in this API."""
_UNSUPPORTED_OPTIONS: dict[str, tuple[float, ...]] = {"mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)}
"""Options that are refused, with their values without effect."""
_HARDWARE = frozenset(
    (
        *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
        *("embedding_only", "num_thread", "num_keep", "mirostat_tau", "mirostat_eta"),
    )
)
"""Options that never change an answer: the server chooses them at its start."""


class _Function(BaseModel, strict=True):
    name: str
    arguments: Any = None


class _ToolCall(BaseModel, strict=True):
    id: str | None = None
    function: _Function


_Effort = Literal["low", "medium", "high", "max"]


def _checked_think(think: object) -> object:
    if think is None or isinstance(think, bool) or think in get_args(_Effort):
        return think
    raise ValueError("think should be true, false, low, medium, high or max")  # a union's own error names its first member


def _integer(name: str, value: object) -> object:
    """Returns the value of an option without a fraction as Ollama reads it: None for no limit and for a random seed."""
    if isinstance(value, float) and math.isfinite(value):
        value = int(value)
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and ((name == "num_predict" and value <= 0) or (name == "seed" and value == -1))
    ):
        return None
    return value


def _lowered(role: object) -> object:
    return role.lower() if isinstance(role, str) else role  # as Ollama reads it


class OllamaMessage(BaseModel, strict=True):
    """One message of a conversation."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_lowered)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def chat_message(self, where: str) -> dict[str, Any]:
        """Converts to a chat request's message; raises InvalidRequest that names it as `where`."""
        if self.images:
            raise InvalidRequest(f"{where}.images: images are not supported", param=f"{where}.images")
        message: dict[str, Any] = {"role": self.role, "content": self.content or "", "reasoning_content": self.thinking}
        if self.tool_name is not None:
            message["name"] = self.tool_name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [{"id": call.id or None, "function": call.function.model_dump()} for call in self.tool_calls]
        return message


class OllamaRequest(Fields, ABC):
    """Fields that both routes share. `stream` is true unless the request says false."""

    keep_alive: KeepAlive = None
    options: dict[str, Any] | None = None
    format: Any = None
    stream: bool | None = None
    think: Annotated[bool | _Effort | None, BeforeValidator(_checked_think)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def chat(self) -> tuple[ChatRequest, list[str]]:
        """Returns the chat request and the names of options without effect; raises InvalidRequest with this API's field names."""
        fields, ignored = self._options()
        fields |= {"model": self.served, "stream": self.stream is not False}
        fields |= {"format": self.format, "logprobs": self.logprobs, "top_logprobs": self.top_logprobs, "messages": self._messages()}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        else:
            fields["enable_thinking"] = self.think
        with renamed_fields(FIELD_NAMES):
            return ChatRequest.read(fields | self._tools())[0], ignored

    def _options(self) -> tuple[dict[str, Any], list[str]]:
        fields: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in (self.options or {}).items():
            if name in _OPTIONS:
                fields[_OPTIONS[name]] = _integer(name, value) if name in _INTEGERS else value
            elif name in _UNSUPPORTED_OPTIONS:
                if value is not None and value not in _UNSUPPORTED_OPTIONS[name]:
                    message = f"options.{name} is not supported, got {brief(value)}: leave it out"
                    raise InvalidRequest(message, param=f"options.{name}", code="unsupported_parameter")
            elif name not in _HARDWARE:
                ignored.append(f"options.{name}")
        return fields, ignored

    @property
    def served(self) -> str | None:
        """The name of the model on this server."""
        return served_name(self.model)

    @property
    def raw_prompt(self) -> str | None:
        """The text that the model continues without a chat template; None for a conversation. Raises InvalidRequest."""
        return None

    @abstractmethod
    def _messages(self) -> list[dict[str, Any]]:
        """Returns the messages of the chat request."""

    def _tools(self) -> dict[str, Any]:
        return {}


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @property
    def empty(self) -> bool:
        """Whether the request only asks for the model to be loaded."""
        return not self.messages

    def _messages(self) -> list[dict[str, Any]]:
        return [message.chat_message(f"messages[{index}]") for index, message in enumerate(self.messages or ())]

    def _tools(self) -> dict[str, Any]:
        # Clients leave out the type, or send it empty, as Go's client does.
        return {"tools": self.tools and [{**tool, "type": "function"} if tool.get("type") in (None, "") else tool for tool in self.tools]}


class GenerateRequest(OllamaRequest):
    """POST /api/generate: one prompt, as the user's message or, if `raw`, as it is."""

    unsupported = {"suffix": ("",), "template": ("",), "context": ([],), "images": ([],)}  # noqa: RUF012
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    @property
    def empty(self) -> bool:
        """Whether the request only asks for the model to be loaded."""
        return not self.prompt

    @property
    def raw_prompt(self) -> str | None:
        """The text that the model continues without a chat template; None for a message. Raises InvalidRequest."""
        if not self.raw:
            return None
        if self.system:
            raise InvalidRequest("raw sends the prompt as it is: leave out system, or raw", param="system")
        return self.prompt

    def _messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]
