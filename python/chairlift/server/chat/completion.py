"""Chat completions for every chat API: renders the prompt, runs the generation, separates reasoning, content and tool calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from starlette.requests import Request

from chairlift.chat.answer import AnswerParser, ChatChoice, ChoiceBuilder, Delta
from chairlift.chat.answer_format import AnswerFormat, answer_grammar
from chairlift.chat.functions import ToolSpec
from chairlift.chat.messages import MAX_CALLS, Message
from chairlift.chat.model import TemplateInputs
from chairlift.chat.reasoning import Reasoning
from chairlift.chat.tools.argument_types import argument_types
from chairlift.chat.tools.hermes import Hermes
from chairlift.chat.tools.parser import ToolCallDelta, ToolParser
from chairlift.chat.user_turn import user_turn_end
from chairlift.engine.validation import check_generates
from chairlift.errors import ContextExceeded, InvalidRequest, brief
from chairlift.outputs import RequestOutput, TokenLogprobs, ToolCall
from chairlift.scheduling import BACKGROUND
from chairlift.server.chat.current_turn import CurrentTurn, turn_labels
from chairlift.server.chat.request import ChatRequest
from chairlift.server.errors import renamed_params
from chairlift.server.generation import Generation
from chairlift.server.http.body import beside
from chairlift.server.http.responses import ignored_header
from chairlift.server.model import ServedModel
from chairlift.server.schema.logprobs import check_prompt_logprobs
from chairlift.server.service import service_of

logger = logging.getLogger(__name__)


class ChatCompletion:
    """The completion of one conversation.

    `generation` holds the response's head and its usage; `headers` belong to the HTTP response.
    """

    def __init__(
        self, generation: Generation, form: AnswerFormat, n: int, headers: dict[str, str], turn: CurrentTurn | None = None
    ) -> None:
        self.generation = generation
        self.headers = headers
        self.turn = turn
        """The request as a turn of a conversation; None if its prompt is no conversation, is truncated, or takes nothing from the cache."""
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        """Set once the first choice has begun, if the request asked for them."""
        self.reasons = form.reasoning is not None and form.shows_reasoning
        """Whether the response may have reasoning."""
        self._format = form
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
        turn_end = None
        with renamed_params(prompt="messages", logprobs="top_logprobs"):
            if raw_prompt is None:
                # With the prompt's log-probabilities all of it is computed, whatever is cached.
                prompt = await _render_prompt(request, model, body, tool_spec, as_turn=body.prompt_logprobs is None)
                turn_end = await _user_turn_end(request, model, body, tool_spec, prompt.tokens)
            else:
                prompt = _RenderedPrompt(await model.encode(request, raw_prompt), Hermes, None)
            show = body.include_reasoning is not False
            hide, chat_model = params.skip_special_tokens, model.chat_model
            form = await beside(request, AnswerFormat, chat_model, tool_spec, prompt.parser_type, prompt.reasoning, hide=hide, show=show)
            if form.control_marks:
                params = replace(params, skip_special_tokens=False)
            relaxed = list(body.relaxed)
            content, budget = params.structured_output, body.thinking_budget()
            structure = await beside(request, answer_grammar, form, content, budget, relaxed)
            ignored = [*ignored, *relaxed]
            if left_out := body.left_out_tools():
                logger.info("request %s: left out tools of types %s", request.state.context.request_id, ", ".join(map(brief, left_out)))
                ignored = [*ignored, *(f"tools.{type}" for type in left_out)]
            params = replace(params, structured_output=structure)
            check_prompt_logprobs([prompt.tokens], params)
            generation = Generation(request, body, [prompt.tokens], params, kind=kind, prefix=prefix, user_turn_end=turn_end)
        if prompt.reasoning is not None:
            generation.usage.reasoning = 0
        headers = ignored_header(ignored)
        if prompt.turn is not None and prompt.turn.exact:
            headers["x-chairlift-exact-history"] = str(prompt.turn.exact)
        return cls(generation, form, params.n, headers, prompt.turn)

    @classmethod
    async def begin_within_context(
        cls, request: Request, body: ChatRequest, ignored: list[str], *, kind: str, prefix: str, raw_prompt: str | None = None
    ) -> tuple[Self, bool]:
        """Like `begin`, but an answer ends with the context, even if the request allows more tokens. Also returns whether it does."""
        begin = partial(cls.begin, request, ignored=ignored, kind=kind, prefix=prefix, raw_prompt=raw_prompt)
        try:
            return await begin(body), False
        except ContextExceeded as error:
            if error.prompt >= error.limit:
                raise
            return await begin(body.model_copy(update={"max_completion_tokens": error.limit - error.prompt})), True

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yields increments; raises the engine's errors. Closing the generator aborts the request: use `contextlib.aclosing`."""
        parsers = [AnswerParser(index, self._format) for index in range(self._n)]
        builders = [ChoiceBuilder() for _ in parsers]
        async with aclosing(self.generation.outputs()) as outputs:
            async for index, output in outputs:
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs = output.prompt_logprobs
                deltas = parsers[index].push(output)
                if self._format.reasoning is not None:
                    self.generation.usage.reasoning = sum(parser.num_reasoning_tokens for parser in parsers)
                if self.turn is not None:
                    self._take_turn(self.turn, builders[index], output, deltas)
                for delta in deltas:
                    yield delta

    async def choices(self) -> list[ChatChoice]:
        """Returns all complete choices; raises the engine's errors."""
        builders = [ChoiceBuilder() for _ in range(self._n)]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                builders[delta.index].add(delta)
        return [builder.choice() for builder in builders]

    def diagnostics(self) -> dict[str, Any]:
        """Returns OpenAI's `prompt_cache_diagnostics`, once an answer has begun, if the client asks for a comparison."""
        turn = self.turn
        if turn is None or turn.compared is None:
            return {}
        if not turn.compared:
            return {"prompt_cache_diagnostics": {"type": "comparison_response_not_found"}}
        return {"prompt_cache_diagnostics": {"type": "cache_hit"} if turn.miss is None else turn.miss.openai()}

    def _take_turn(self, turn: CurrentTurn, builder: ChoiceBuilder, output: RequestOutput, deltas: Sequence[Delta]) -> None:
        """Records an increment in the turn."""
        generation = self.generation
        if not turn.begun:
            turn.begin(generation.id, generation.usage.cached)
        turn.push(output)
        for delta in deltas:
            builder.add(delta)
        if output.finish_reason:
            turn.settle(output, generation.usage.prompt - generation.usage.cached)
        if output.finish_reason in ("stop", "length") and (message := _as_returned(builder.choice())) is not None:
            turn.end_answer(output.index, message)


@dataclass(frozen=True, slots=True)
class _RenderedPrompt:
    """A prompt's token ids and how to parse the output."""

    tokens: list[int]
    parser_type: type[ToolParser]
    reasoning: Reasoning | None
    """None if the model does not reason."""
    turn: CurrentTurn | None = None


async def prompt_of(request: Request, model: ServedModel, body: ChatRequest, *, must_fit: bool = True) -> list[int]:
    """Returns the token ids of a conversation's prompt; raises InvalidRequest, with `must_fit` also for one that exceeds the context."""
    tool_spec = await asyncio.to_thread(body.tool_spec)
    with renamed_params(prompt="messages"):
        return (await _render_prompt(request, model, body, tool_spec, must_fit=must_fit)).tokens


async def _render_prompt(
    request: Request, model: ServedModel, body: ChatRequest, tool_spec: ToolSpec, *, must_fit: bool = True, as_turn: bool = False
) -> _RenderedPrompt:
    """Renders the prompt, with `as_turn` as a turn of its conversation; raises InvalidRequest."""
    given, inputs = await asyncio.to_thread(_template_inputs, model, body, tool_spec)
    conversation, variables, parser_type, tools = inputs
    must_fit = must_fit and body.truncate_prompt_tokens is None
    rendered = await model.render(request, conversation, variables, must_fit=must_fit, kept=body.cache_salt is None)
    turn = None
    # The requests of a batch are no conversations, and so many that they would displace those that are.
    if as_turn and body.truncate_prompt_tokens is None and body.priority != BACKGROUND:
        service = service_of(request)
        parse = partial(_parse_calls, parser_type, tool_spec) if service.exact_history else None
        labels = turn_labels(request, model, body)
        turn = await beside(request, CurrentTurn, service.turns, model, labels, given, {**variables, "tools": tools}, rendered, parse)
        rendered = turn.tokens
    tokens = body.truncate(rendered, model.engine.info.max_model_len)
    continued = conversation[-1] if variables.get("continue_final_message") else None
    return _RenderedPrompt(tokens, parser_type, model.chat_model.reasoning_after(tokens, continued), turn)


async def _user_turn_end(request: Request, model: ServedModel, body: ChatRequest, tool_spec: ToolSpec, tokens: list[int]) -> int | None:
    """Returns where the user's last turn ends: calls of tools follow it, and templates drop their thinking when the user goes on.

    None for a model without recurrent layers, for a truncated prompt, and where the engine finds it itself, because nothing follows.
    """
    if not model.engine.info.recurrent or body.truncate_prompt_tokens is not None:
        return None
    try:
        inputs = await asyncio.to_thread(model.chat_model.inputs_up_to_user, body.conversation(), body.variables(), tool_spec)
        if inputs is None:
            return None
        beginning = await model.render(request, inputs.conversation, inputs.variables, kept=body.cache_salt is None)
    except InvalidRequest:  # the template wants more than these messages
        return None
    return await beside(request, user_turn_end, tokens, beginning, model.engine.tokenizer.eos_token_ids)


def _parse_calls(parser_type: type[ToolParser], tool_spec: ToolSpec, text: str) -> list[str | ToolCallDelta]:
    """Separates a whole answer's text into content and tool calls."""
    typed = tool_spec.tools if parser_type.needs_types else ()
    parser = parser_type([tool.name for tool in tool_spec.tools], types={tool.name: argument_types(tool.parameters) for tool in typed})
    return parser.push(text) + parser.end()


def called(call: ToolCall | ToolCallDelta) -> dict[str, Any]:
    """Returns the called function or custom tool in OpenAI's format."""
    if call.custom:
        return {"type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _as_returned(choice: ChatChoice) -> dict[str, Any] | None:
    """Returns a choice as the chat template gets it when the client returns it; None if the client cannot return it."""
    calls = [{"id": call.id, **called(call)} for call in choice.calls[:MAX_CALLS]]
    fields = {"role": "assistant", "content": choice.content, "reasoning_content": choice.reasoning, "tool_calls": calls}
    try:
        return Message.model_validate(fields).for_template("the answer")
    except InvalidRequest:  # arguments that are nested too deep
        return None


def _template_inputs(model: ServedModel, body: ChatRequest, tool_spec: ToolSpec) -> tuple[list[dict[str, Any]], TemplateInputs]:
    """Returns the conversation as the client gave it, and the inputs of the chat template, in which calls may be text."""
    conversation = body.conversation()
    return conversation, model.chat_model.template_inputs(conversation, body.variables(), tool_spec)
