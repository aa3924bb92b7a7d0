"""Chat completions for every chat API: renders the prompt, runs the generation, separates reasoning, content and tool calls."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Self

from starlette.requests import Request

from chairlift.engine.request import check_generates
from chairlift.errors import InvalidRequest
from chairlift.grammar.source import ANYTHING, after_reasoning, calls_grammar, free_calls_grammar
from chairlift.outputs import RequestOutput, TokenLogprobs
from chairlift.sampling import ReasoningBudget, StructuredOutput
from chairlift.server.chat.reasoning import (
    REASONING_FORMATS,
    TAIL_TOKENS,
    Reasoning,
    ReasoningParser,
    ReasoningState,
    ReasoningTokens,
    format_for_template,
)
from chairlift.server.chat.request import ChatRequest, ToolSpec
from chairlift.server.chat.tools.argument_types import argument_types
from chairlift.server.chat.tools.custom import CustomCalls
from chairlift.server.chat.tools.formats import TOOL_PARSERS, parser_for_template
from chairlift.server.chat.tools.hermes import Hermes
from chairlift.server.chat.tools.parser import ToolCallDelta, ToolParser
from chairlift.server.chat.tools.prompted import add_tool_prompt
from chairlift.server.errors import brief
from chairlift.server.generation import Generation
from chairlift.server.http.body import beside
from chairlift.server.http.responses import ignored_header
from chairlift.server.model import ServedModel
from chairlift.server.schema.json_schema import checked_schema
from chairlift.server.schema.logprobs import check_prompt_logprobs
from chairlift.server.service import service_of
from chairlift.server.usage import Usage

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Delta:
    """An increment of one choice; its reasoning comes before its content, which comes before its tool calls."""

    index: int
    """Index of the choice."""
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    """At most one for each call."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of all tokens since the last increment, including hidden ones, if the request asked for them."""
    finish_reason: str | None = None
    """`stop`, `length` or `tool_calls`; set on the choice's last increment."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the choice."""

    @property
    def is_plain(self) -> bool:
        """Whether the increment holds either content or reasoning, and nothing else."""
        return bool(self.content) != bool(self.reasoning) and not self.calls and self.logprobs is None and self.finish_reason is None


@dataclass(slots=True)
class ToolCall:
    """A tool call of the model. `arguments` should be the text of a JSON object, but is what the model wrote."""

    id: str
    name: str
    arguments: str = ""
    custom: bool = False
    """Whether `arguments` are the free text of a custom tool's input."""


@dataclass(slots=True)
class ChatChoice:
    """One complete choice."""

    content: str | None = None
    """None if there are only tool calls."""
    reasoning: str | None = None
    """None if the model has not reasoned."""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatCompletion:
    """The completion of one conversation.

    `generation` holds the response's head and its usage; `headers` belong to the HTTP response.
    """

    def __init__(self, generation: Generation, parser_config: _ParserConfig, n: int, headers: dict[str, str]) -> None:
        self.generation = generation
        self.headers = headers
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        """Set once the first choice has begun, if the request asked for them."""
        self.reasons = parser_config.reasoning is not None and parser_config.shows_reasoning
        """Whether the response may have reasoning."""
        self._parser_config = parser_config
        self._n = n

    @classmethod
    async def begin(
        cls, request: Request, body: ChatRequest, ignored: list[str], *, kind: str, prefix: str, raw_prompt: str | None = None
    ) -> Self:
        """Validates the request and renders its prompt; does not submit anything to the engine yet.

        `kind` is the `object` of the response, `prefix` begins its id, and `ignored` are the names of fields without effect. A `raw_prompt`
        takes the place of the rendered conversation; its output is all content. Raises InvalidRequest or ApiError.
        """
        model = await service_of(request).use(request, body.model)
        check_generates(model.engine.info)
        params = await beside(request, body.params, model.default_sampling)
        tool_spec = await beside(request, body.tool_spec)
        try:
            if raw_prompt is None:
                prompt = await _render_prompt(request, model, body, tool_spec)
            else:
                prompt = _RenderedPrompt(await model.encode(request, raw_prompt), Hermes, None)
            show = body.include_reasoning is not False
            parser_config = await beside(request, _ParserConfig, model, tool_spec, prompt, hide=params.skip_special_tokens, show=show)
            if parser_config.control_marks:
                params = replace(params, skip_special_tokens=False)
            relaxed = list(body.relaxed)
            content, budget = params.structured_output, body.thinking_budget()
            structure = await beside(request, _structured_output, parser_config, content, budget, relaxed)
            ignored = [*ignored, *relaxed]
            if left_out := body.left_out_tools():
                logger.info("request %s: left out tools of types %s", request.state.context.request_id, ", ".join(map(brief, left_out)))
                ignored = [*ignored, *(f"tools.{type}" for type in left_out)]
            params = replace(params, structured_output=structure)
            check_prompt_logprobs([prompt.tokens], params)
            generation = Generation(request, body, [prompt.tokens], params, kind=kind, prefix=prefix)
        except InvalidRequest as error:
            # The engine's names for what the client sent.
            error.param = {"prompt": "messages", "logprobs": "top_logprobs"}.get(error.param or "", error.param)
            raise
        if prompt.reasoning is not None:
            generation.usage.reasoning = 0
        return cls(generation, parser_config, params.n, ignored_header(ignored))

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yields increments; raises the engine's errors. Closing the generator aborts the request: use `contextlib.aclosing`."""
        choices = [_ChoiceParser(index, self._parser_config, self.generation.usage) for index in range(self._n)]
        async with aclosing(self.generation.outputs()) as outputs:
            async for index, output in outputs:
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs = output.prompt_logprobs
                for delta in choices[index].push(output):
                    yield delta

    async def choices(self) -> list[ChatChoice]:
        """Returns all complete choices; raises the engine's errors."""
        choices = [ChatChoice() for _ in range(self._n)]
        contents: list[list[str]] = [[] for _ in choices]
        reasonings: list[list[str]] = [[] for _ in choices]
        arguments: list[list[list[str]]] = [[] for _ in choices]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                choice = choices[delta.index]
                contents[delta.index].append(delta.content)
                reasonings[delta.index].append(delta.reasoning)
                for call in delta.calls:
                    if call.id is not None and call.name is not None:
                        choice.calls.append(ToolCall(call.id, call.name, custom=call.custom))
                        arguments[delta.index].append([])
                    arguments[delta.index][call.index].append(call.arguments)
                if delta.logprobs is not None:
                    choice.logprobs = choice.logprobs or []
                    choice.logprobs += delta.logprobs
                if delta.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        for choice, content, reasoning, parts in zip(choices, contents, reasonings, arguments, strict=True):
            text = "".join(content)
            choice.content = text if text or not choice.calls else None
            choice.reasoning = "".join(reasoning) or None
            for tool_call, part in zip(choice.calls, parts, strict=True):
                tool_call.arguments = "".join(part)
        return choices


@dataclass(frozen=True, slots=True)
class _RenderedPrompt:
    """A prompt's token ids and how to parse the output."""

    tokens: list[int]
    parser_type: type[ToolParser]
    reasoning: Reasoning | None
    """None if the model does not reason."""


class _ParserConfig:
    """How to parse the output of a completion: reasoning, tools, and the control tokens to hide."""

    def __init__(self, model: ServedModel, tool_spec: ToolSpec, prompt: _RenderedPrompt, *, hide: bool, show: bool) -> None:
        """`hide` removes control tokens that are not marks from the text, `show` includes the reasoning in the response."""
        self.model = model
        self.tool_spec = tool_spec
        self.parser_type = prompt.parser_type
        self.reasoning = prompt.reasoning
        self.shows_reasoning = show
        self._parses_calls = bool(tool_spec) or self.parser_type.wraps_content
        self._names = [tool.name for tool in tool_spec.tools]
        typed = tool_spec.tools if self.parser_type.needs_types else ()
        self._types = {tool.name: argument_types(tool.parameters) for tool in typed}
        if not self._parses_calls and self.reasoning is None:
            self.marks: tuple[str, ...] = ()
        else:
            tool_marks = (*self.parser_type.marks, *self.parser_type.inner_marks) if self._parses_calls else ()
            form = self.reasoning and self.reasoning.format
            self.marks = (*tool_marks, *((form.start, form.end, *form.dropped) if form else ()))
        control_texts = model.engine.tokenizer.control_texts if self.marks else ()
        self.control_marks = [text for text in control_texts if any(text in mark for mark in self.marks)]
        """The marks, or parts of marks, that are control tokens: the engine must not remove them from the text."""
        hidden = [re.escape(text) for text in control_texts if text not in self.control_marks]
        # If no mark is a control token, the engine removes control tokens itself.
        self._hidden = re.compile("|".join(hidden)) if hide and hidden and self.control_marks else None

    def call_parser(self) -> ToolParser | None:
        """Returns a parser of tool calls for one choice; None if there are no tools."""
        return self.parser_type(self._names, types=self._types) if self._parses_calls else None

    def visible(self, text: str) -> str:
        """Removes hidden control tokens from a text of whole tokens."""
        return self._hidden.sub("", text) if self._hidden else text

    def mark_ids(self) -> dict[str, int]:
        """Returns the marks, and parts of marks, that are single tokens, with their ids."""
        tokenizer = self.model.engine.tokenizer
        encoded = {mark: tokenizer.encode(mark, add_special_tokens=False) for mark in (*self.control_marks, *self.marks)}
        return {mark: ids[0] for mark, ids in encoded.items() if len(ids) == 1}


async def prompt_of(request: Request, model: ServedModel, body: ChatRequest, *, must_fit: bool = True) -> list[int]:
    """Returns the token ids of a conversation's prompt; raises InvalidRequest, with `must_fit` also for one that exceeds the context."""
    tool_spec = await asyncio.to_thread(body.tool_spec)
    return (await _render_prompt(request, model, body, tool_spec, must_fit=must_fit)).tokens


async def _render_prompt(
    request: Request, model: ServedModel, body: ChatRequest, tool_spec: ToolSpec, *, must_fit: bool = True
) -> _RenderedPrompt:
    """Renders the prompt; raises InvalidRequest."""
    conversation, variables, parser_type = await asyncio.to_thread(_template_inputs, model, body, tool_spec)
    must_fit = must_fit and body.truncate_prompt_tokens is None
    rendered = await model.render(request, conversation, variables, must_fit=must_fit, kept=body.cache_salt is None)
    tokens = body.truncate(rendered, model.engine.info.max_model_len)
    return _RenderedPrompt(tokens, parser_type, _reasoning(model, tokens, conversation[-1] if body.continue_final_message else None))


def _reasoning(model: ServedModel, prompt: list[int], continued: dict[str, Any] | None) -> Reasoning | None:
    """Returns how outputs to `prompt`, which continue the message `continued`, contain reasoning; None if they do not."""
    tokenizer, name = model.engine.tokenizer, model.reasoning_parser
    form = format_for_template(tokenizer.template.source) if name == "auto" else REASONING_FORMATS.get(name)
    if form is None:
        return None
    return Reasoning.after_prompt(form, tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False), continued)


def _structured_output(
    parser_config: _ParserConfig, content: StructuredOutput | None, budget: int | None, relaxed: list[str]
) -> StructuredOutput | None:
    """Returns the grammar of an output; None if it is unconstrained.

    `content` is the grammar that the client requested for the answer, `budget` the maximum of reasoning tokens. Appends to `relaxed` the
    names of what is not enforced.
    """
    tool_spec, reasoning = parser_config.tool_spec, parser_config.reasoning
    mark_ids = parser_config.mark_ids()
    structure = _tool_grammar(parser_config, mark_ids, content, relaxed) if tool_spec else content
    may_reason = reasoning is not None and reasoning.state is not ReasoningState.OVER
    if budget is not None and not may_reason:
        relaxed.append("thinking_token_budget")
        budget = None
    if reasoning is None or not may_reason or (structure is None and budget is None):
        return structure
    engine = parser_config.model.engine
    ends = [token for token in engine.tokenizer.eos_token_ids if token < engine.info.vocab_size]
    form = reasoning.format
    bounded = after_reasoning(
        structure or StructuredOutput("grammar", ANYTHING, "thinking_token_budget"),
        form,
        mark_ids,
        ends,
        opened=reasoning.state is ReasoningState.OPEN,
        complete=structure is not content or structure is None,
    )
    if budget is None:
        return bounded
    opened = form.implicit or reasoning.state is ReasoningState.OPEN
    forced = form.end + form.after_end + ("" if tool_spec else form.answer)
    return bounded._replace(
        budget=ReasoningBudget(
            budget,
            start="" if opened else form.start,
            end=form.end,
            end_tokens=tuple(engine.tokenizer.encode(forced, add_special_tokens=False)),
            again=form.after_end + form.start if form.repeats else "",
        )
    )


def _tool_grammar(
    parser_config: _ParserConfig, mark_ids: dict[str, int], content: StructuredOutput | None, relaxed: list[str]
) -> StructuredOutput | None:
    """Returns the grammar of an answer that may or must contain tool calls; None if the answer is unconstrained.

    `content` is the grammar that the client requested for an answer without calls. Appends to `relaxed` the paths of schema keywords that
    are not enforced.
    """
    tool_spec = parser_config.tool_spec
    strict = any(tool.strict for tool in tool_spec.tools)
    if not (tool_spec.required or content or strict):
        return None
    free = not (tool_spec.required or content)
    schemas = {tool.name: None if free and not tool.strict else tool.arguments_schema() for tool in tool_spec.tools}
    for name, schema in schemas.items():
        if schema is not None:
            if schema.get("type", "object") != "object":
                raise InvalidRequest(f'the schema of {name}\'s parameters must have "type": "object"', param="tools")
            text, paths = checked_schema(schema, "tools", f"tools.{name}")
            schemas[name] = json.loads(text)
            relaxed += [f"tools.{name}{path}" for path in paths]
    call_format = parser_config.parser_type.call_format(parser_config.model.engine.tokenizer.template.source)
    if not free:
        instead = None if tool_spec.required else content
        return calls_grammar(call_format, schemas, mark_ids, several=tool_spec.parallel, instead=instead)
    if call_format.content:  # content has marks too, so no mark tells calls from content
        relaxed += [f"tools.{tool.name}.strict" for tool in tool_spec.tools if tool.strict]
        return None
    trigger = next((mark for mark in parser_config.parser_type.marks if call_format.begin.startswith(mark)), "")
    return free_calls_grammar(trigger, call_format, schemas, mark_ids, several=tool_spec.parallel)


def _template_inputs(
    model: ServedModel, body: ChatRequest, tool_spec: ToolSpec
) -> tuple[list[dict[str, Any]], dict[str, Any], type[ToolParser]]:
    """Returns the conversation and variables for the chat template, and the parser for the calls that the template elicits."""
    conversation, variables = body.conversation(), body.variables()
    tools = [{"type": "function", "function": tool.for_template()} for tool in tool_spec.tools]
    template = model.engine.tokenizer.template
    if body.documents and not template.uses("documents"):
        raise InvalidRequest("this model's chat template has no place for documents: put them into a message", param="documents")
    name = model.tool_call_parser
    parser_type = parser_for_template(template.source) if name == "auto" else TOOL_PARSERS[name]
    if not tools and not any(message["role"] == "tool" or "tool_calls" in message for message in conversation):
        return conversation, variables, parser_type
    if not template.uses("tools"):
        return add_tool_prompt(conversation, tools), variables, Hermes
    return conversation, {**variables, "tools": tools} if tools else variables, parser_type


class _ChoiceParser:
    """Converts the engine's outputs of one choice to increments."""

    def __init__(self, index: int, parser_config: _ParserConfig, usage: Usage) -> None:
        self._index = index
        self._config = parser_config
        self._tool_spec = parser_config.tool_spec
        self._usage = usage
        reasoning = parser_config.reasoning
        piece = parser_config.model.engine.tokenizer.piece
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning)
        self._reasoning_tokens = None if reasoning is None else ReasoningTokens(reasoning, piece)
        self._calls = parser_config.call_parser()
        self._custom = CustomCalls(self._tool_spec.custom)
        self._called = False
        self._logprobs: list[TokenLogprobs] = []

    def push(self, output: RequestOutput) -> list[Delta]:
        """Returns the increments of an output: none if its text is held back (half a character, a possible stop string or mark)."""
        if output.logprobs:
            self._logprobs += output.logprobs
        deltas = self._parse(output)
        if output.finish_reason and not deltas:
            deltas.append(Delta(self._index))
        if not deltas:
            return deltas
        if self._logprobs:
            deltas[0].logprobs, self._logprobs = self._logprobs, []
        if output.finish_reason:
            last = deltas[-1]
            # OpenAI returns `stop` if the client itself chose the function.
            called = self._called and output.finish_reason == "stop" and not self._tool_spec.named
            last.finish_reason = "tool_calls" if called else output.finish_reason
            last.stop_reason = output.stop_reason
        return deltas

    def _parse(self, output: RequestOutput) -> list[Delta]:
        """Separates text into reasoning, content and calls."""
        reasoning, answer, final = "", self._config.visible(output.text), output.finish_reason is not None
        if self._reasoning is not None and self._reasoning_tokens is not None:
            reasoning, answer = self._reasoning.push(answer, final=final)
            if not self._config.shows_reasoning:
                reasoning = ""
            self._usage.reasoning = (self._usage.reasoning or 0) + self._reasoning_tokens.count(output.token_ids)
        deltas = [Delta(self._index, reasoning=reasoning)] if reasoning else []
        if self._calls is None:
            if answer and deltas:
                deltas[-1].content = answer
            elif answer:
                deltas.append(Delta(self._index, answer))
            return deltas
        for part in self._calls.push(answer) + (self._calls.end() if final else []):
            if isinstance(part, str):
                self._append_calls(deltas, self._custom.end())
                if not deltas or deltas[-1].calls:
                    deltas.append(Delta(self._index))
                deltas[-1].content += part
            elif self._tool_spec.parallel or part.index == 0:
                self._called = True
                self._append_calls(deltas, self._custom.push(part))
        if final:
            self._append_calls(deltas, self._custom.end())
        return deltas

    def _append_calls(self, deltas: list[Delta], parts: Sequence[ToolCallDelta]) -> None:
        """Appends increments of calls to the newest delta."""
        if parts and not deltas:
            deltas.append(Delta(self._index))
        for part in parts:
            _append_call(deltas[-1].calls, part)


def _append_call(calls: list[ToolCallDelta], part: ToolCallDelta) -> None:
    """Appends a call's next part, joined with the previous part of the same call."""
    if calls and calls[-1].index == part.index:
        calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
    else:
        calls.append(part)
