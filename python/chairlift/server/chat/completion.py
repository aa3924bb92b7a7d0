"""Chat completions for every chat API: renders the prompt, runs the generation, separates tool calls from content."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Self

from starlette.requests import Request

from chairlift.errors import InvalidRequest
from chairlift.grammar.source import calls_grammar, free_calls_grammar
from chairlift.outputs import RequestOutput, TokenLogprobs
from chairlift.sampling import StructuredOutput
from chairlift.server.chat.request import ChatRequest, ToolSpec
from chairlift.server.chat.tools.formats import TOOL_PARSERS, Hermes, parser_for_template
from chairlift.server.chat.tools.parser import ToolCallDelta, ToolParser
from chairlift.server.chat.tools.prompted import add_tool_prompt
from chairlift.server.generation import Generation
from chairlift.server.http.responses import ignored_header
from chairlift.server.schema.logprobs import check_prompt_logprobs
from chairlift.server.schema.response_format import schema_text
from chairlift.server.service import Service, service_of


@dataclass(slots=True)
class Delta:
    """An increment of one choice; its content comes before its tool calls."""

    index: int
    """Index of the choice."""
    content: str = ""
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
        """Whether the increment holds content and nothing else."""
        return bool(self.content) and not self.calls and self.logprobs is None and self.finish_reason is None


@dataclass(slots=True)
class ToolCall:
    """A tool call of the model. `arguments` should be the text of a JSON object, but is what the model wrote."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatChoice:
    """One complete choice."""

    content: str | None = None
    """None if there are only tool calls."""
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
        self._parser_config = parser_config
        self._n = n

    @classmethod
    async def begin(cls, request: Request, body: ChatRequest, ignored: list[str], *, kind: str, prefix: str) -> Self:
        """Validates the request and renders its prompt; does not submit anything to the engine yet.

        `kind` is the `object` of the response, `prefix` begins its id, and `ignored` are the names of fields without effect. Raises
        InvalidRequest or ApiError.
        """
        service = service_of(request)
        service.check_model(body.model)
        params, tool_spec = body.params(service.default_sampling), body.tool_spec()
        try:
            prompt, parser_type = await _render_prompt(service, body, tool_spec)
            control_texts = service.engine.tokenizer.control_texts if tool_spec else ()
            parser_config = _ParserConfig(tool_spec, parser_type, control_texts, hide=params.skip_special_tokens)
            if parser_config.control_marks:
                params = replace(params, skip_special_tokens=False)
            if tool_spec:
                params = replace(params, structured_output=_tool_grammar(service, parser_config, params.structured_output))
            check_prompt_logprobs([prompt], params)
            generation = Generation(request, body, [prompt], params, kind=kind, prefix=prefix)
        except InvalidRequest as error:
            if error.param == "prompt":  # the engine's name for what the client sent as messages
                error.param = "messages"
            raise
        return cls(generation, parser_config, params.n, ignored_header(ignored))

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yields increments; raises the engine's errors. Closing the generator aborts the request: use `contextlib.aclosing`."""
        choices = [_ChoiceParser(index, self._parser_config) for index in range(self._n)]
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
        arguments: list[list[list[str]]] = [[] for _ in choices]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                choice = choices[delta.index]
                contents[delta.index].append(delta.content)
                for call in delta.calls:
                    if call.id is not None and call.name is not None:
                        choice.calls.append(ToolCall(call.id, call.name))
                        arguments[delta.index].append([])
                    arguments[delta.index][call.index].append(call.arguments)
                if delta.logprobs is not None:
                    choice.logprobs = choice.logprobs or []
                    choice.logprobs += delta.logprobs
                if delta.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        for choice, content, parts in zip(choices, contents, arguments, strict=True):
            text = "".join(content)
            choice.content = text if text or not choice.calls else None
            for tool_call, part in zip(choice.calls, parts, strict=True):
                tool_call.arguments = "".join(part)
        return choices


class _ParserConfig:
    """How to parse the output of a completion: the tools, the parser and the control tokens to hide."""

    def __init__(self, tool_spec: ToolSpec, parser_type: type[ToolParser], control_texts: Sequence[str], *, hide: bool) -> None:
        """`control_texts` are the texts of the vocabulary's control tokens; `hide` removes those that do not mark tool calls."""
        self.tool_spec = tool_spec
        self.parser_type = parser_type
        marks = (*parser_type.marks, *parser_type.inner_marks)
        self.control_marks = [text for text in control_texts if text in marks]
        """The parser's marks that are control tokens: the engine must not remove them from the text."""
        hidden = [re.escape(text) for text in control_texts if text not in marks]
        # If no mark is a control token, the engine removes control tokens itself.
        self._hidden = re.compile("|".join(hidden)) if hide and hidden and self.control_marks else None

    def parser(self) -> ToolParser | None:
        """Returns a parser for one choice; None if there are no tools."""
        return self.parser_type([tool.function.name for tool in self.tool_spec.tools]) if self.tool_spec else None

    def visible(self, text: str) -> str:
        """Removes hidden control tokens from a text of whole tokens."""
        return self._hidden.sub("", text) if self._hidden else text


async def prompt_of(service: Service, body: ChatRequest) -> list[int]:
    """Returns the token ids of a conversation's prompt; raises InvalidRequest."""
    return (await _render_prompt(service, body, body.tool_spec()))[0]


async def _render_prompt(service: Service, body: ChatRequest, tool_spec: ToolSpec) -> tuple[list[int], type[ToolParser]]:
    """Returns the prompt's token ids, and the parser for tool calls in the output."""
    conversation, variables, parser_type = await asyncio.to_thread(_template_inputs, service, body, tool_spec)
    return body.truncate(await service.render(conversation, **variables)), parser_type


def _tool_grammar(service: Service, parser_config: _ParserConfig, content: StructuredOutput | None) -> StructuredOutput | None:
    """Returns the grammar of an output that may or must contain tool calls; None if the output is unconstrained.

    `content` is the grammar that the client requested for an output without calls.
    """
    tool_spec, tokenizer = parser_config.tool_spec, service.engine.tokenizer
    strict = any(tool.function.strict for tool in tool_spec.tools)
    if not (tool_spec.required or content or strict):
        return None
    free = not (tool_spec.required or content)
    schemas = {tool.function.name: None if free and not tool.function.strict else tool.function.parameters for tool in tool_spec.tools}
    for name, schema in schemas.items():
        schema_text(schema or {}, "tools", f"the schema of {name}'s parameters")
        if (schema or {}).get("type", "object") != "object":
            raise InvalidRequest(f'the schema of {name}\'s parameters must have "type": "object"', param="tools")
    control_ids = {mark: tokenizer.encode(mark, add_special_tokens=False)[0] for mark in parser_config.control_marks}
    call_format = parser_config.parser_type.call_format(tokenizer.template.source)
    if not free:
        instead = None if tool_spec.required else content
        return calls_grammar(call_format, schemas, control_ids, several=tool_spec.parallel, instead=instead)
    trigger = parser_config.parser_type.marks[0] if call_format.begin else ""
    return free_calls_grammar(trigger, call_format, schemas, control_ids, several=tool_spec.parallel)


def _template_inputs(
    service: Service, body: ChatRequest, tool_spec: ToolSpec
) -> tuple[list[dict[str, Any]], dict[str, Any], type[ToolParser]]:
    """Returns the conversation and variables for the chat template, and the parser for the calls that the template elicits."""
    conversation, variables = body.conversation(), body.variables()
    tools = [tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in tool_spec.tools]
    if body.documents and not service.engine.tokenizer.template.uses("documents"):
        raise InvalidRequest("this model's chat template has no place for documents: put them into a message", param="documents")
    if not tools and not any(message["role"] == "tool" or "tool_calls" in message for message in conversation):
        return conversation, variables, Hermes
    template = service.engine.tokenizer.template
    if not template.uses("tools"):
        return add_tool_prompt(conversation, tools), variables, Hermes
    name = service.tool_call_parser
    parser_type = parser_for_template(template.source) if name == "auto" else TOOL_PARSERS[name]
    return conversation, {**variables, "tools": tools} if tools else variables, parser_type


class _ChoiceParser:
    """Converts the engine's outputs of one choice to increments."""

    def __init__(self, index: int, parser_config: _ParserConfig) -> None:
        self._index = index
        self._tool_spec = parser_config.tool_spec
        self._visible = parser_config.visible
        self._parser = parser_config.parser()
        self._called = False
        self._logprobs: list[TokenLogprobs] = []

    def push(self, output: RequestOutput) -> list[Delta]:
        """Returns the increments of an output: none if its text is held back (half a character, a possible stop string or tool call)."""
        if output.logprobs:
            self._logprobs += output.logprobs
        deltas = self._parse(output) if self._parser else [Delta(self._index, output.text)] if output.text else []
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
        """Separates text into content and calls."""
        assert self._parser is not None
        parsed = self._parser.push(self._visible(output.text))
        if output.finish_reason:
            parsed += self._parser.end()
        deltas: list[Delta] = []
        for part in parsed:
            if isinstance(part, str):
                if not deltas or deltas[-1].calls:
                    deltas.append(Delta(self._index))
                deltas[-1].content += part
            elif self._tool_spec.parallel or part.index == 0:
                self._called = True
                if not deltas:
                    deltas.append(Delta(self._index))
                _append_call(deltas[-1].calls, part)
        return deltas


def _append_call(calls: list[ToolCallDelta], part: ToolCallDelta) -> None:
    """Appends a call's next part, joined with the previous part of the same call."""
    if calls and calls[-1].index == part.index:
        calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
    else:
        calls.append(part)
