"""The request of chat APIs: messages, tools, and further inputs of the chat template."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from chairlift.chat.functions import Function, Tool, ToolSpec, choose
from chairlift.chat.messages import Message, check_depth, checked_variables
from chairlift.errors import InvalidRequest, brief
from chairlift.sampling import SamplingParams
from chairlift.server.schema.fields import Fields, GenerationRequest

MAX_TOOLS = 128
MAX_MESSAGES = 4096
MAX_DOCUMENTS = 256
MAX_VARIABLES = 64
MAX_ID = 256
"""Characters of an answer's id that a client sends."""


class PromptCacheOptions(BaseModel, strict=True):
    """What the client says about the prompt cache: hints, and the id of the answer to compare the prompt with."""

    mode: str | None = None
    ttl: str | None = None
    comparison_response_id: Annotated[str, Field(max_length=MAX_ID)] | None = None


class Thinking(BaseModel, strict=True):
    """Whether the model reasons, and for how many tokens at most: the field of DeepSeek's, GLM's and Kimi's APIs."""

    type: str
    budget_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None


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
    thinking: Thinking | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    include_reasoning: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def legacy(self) -> bool:
        """Whether the client uses `functions`, the predecessor of `tools`."""
        return bool(self.functions)

    def conversation(self) -> list[dict[str, Any]]:
        """Converts the messages for a chat template; raises InvalidRequest."""
        return [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def variables(self) -> dict[str, Any]:
        """Returns the chat template's inputs other than messages and tools; raises InvalidRequest."""
        variables = checked_variables(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        if (thinking := self._thinking()) is not None:
            for name in ("enable_thinking", "thinking"):  # Qwen's name and that of Granite and DeepSeek
                variables.setdefault(name, thinking)
        if self.documents:
            check_depth("documents", self.documents)
            variables["documents"] = self.documents
        continues = self.continue_final_message or (self.messages[-1].role == "assistant" and self.messages[-1].prefix)
        if continues:
            if self.add_generation_prompt:
                field = "continue_final_message" if self.continue_final_message else f"messages[{len(self.messages) - 1}].prefix"
                message = f"{field} extends the last message, add_generation_prompt begins a new one: leave out one of them"
                raise InvalidRequest(message, param=field)
            variables["continue_final_message"] = True
        if continues or self.add_generation_prompt is False:
            variables["add_generation_prompt"] = False
        return variables

    def _thinking(self) -> bool | None:
        """Returns whether the model should reason; None leaves it to the chat template."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None:
            return self.thinking.type != "disabled"
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    def thinking_budget(self) -> int | None:
        """Returns the maximum number of reasoning tokens; None for no limit."""
        if self.thinking_token_budget is None and self.thinking is not None:
            return self.thinking.budget_tokens
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def tool_spec(self) -> ToolSpec:
        """Returns the tools that may be called; raises InvalidRequest."""
        if self.legacy:
            if self.tools:
                raise InvalidRequest("functions is the older name of tools: send one of them", param="functions")
            tools = self.functions or []
        else:
            tools = [tool.as_function(f"tools[{i}]") for i, tool in enumerate(self.tools or ()) if not tool.left_out]
        return choose(
            tools,
            self.function_call if self._choice_field == "function_call" else self.tool_choice,
            param="functions" if self.legacy else "tools",
            field=self._choice_field,
            custom=frozenset(tool.custom.name for tool in self.tools or () if tool.custom is not None),
            parallel=not (self.legacy or self.parallel_tool_calls is False),
        )

    def left_out_tools(self) -> list[str]:
        """Returns the types of the tools that the server does not know."""
        return list(dict.fromkeys(tool.type for tool in self.tools or () if tool.left_out))

    @property
    def _choice_field(self) -> str:
        return "function_call" if self.function_call is not None and self.tool_choice is None else "tool_choice"

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


class PromptOrMessages(Fields):
    """A prompt, or a conversation as in /v1/chat/completions."""

    prompt: Any = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """Returns the conversation as a chat request; raises InvalidRequest."""
        names = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "cache_salt"}
        return ChatRequest.read(self.model_dump(include=names, exclude_none=True))[0]


def media_note(kind: str) -> str:
    """Returns what stands for an image or a file in a tool's result, which no client can take out of the conversation again."""
    return f"[{kind}: this model reads only text]"


def text_of(content: object, where: str, read: Callable[[object, str], str]) -> str:
    """Returns a text, or the texts of parts that `read` returns. Raises InvalidRequest that names the content as `where`."""
    match content:
        case str(text):
            return text
        case [*parts]:
            return "\n".join(read(part, f"{where}[{index}]") for index, part in enumerate(parts))
    raise InvalidRequest(f"{where} must be a string or a list of parts, got {brief(content)}", param=where.partition("[")[0])


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
