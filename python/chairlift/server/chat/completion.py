"""One turn of the assistant, whatever the API that asked for it: the prompt made, the engine at work, calls told from content."""

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
from chairlift.server.chat.request import ChatRequest, Offer
from chairlift.server.chat.tools import SYNTAXES, syntax_of
from chairlift.server.chat.tools.call import CallDelta
from chairlift.server.chat.tools.hermes import Hermes
from chairlift.server.chat.tools.prompted import told
from chairlift.server.chat.tools.syntax import Syntax
from chairlift.server.generation import Generation
from chairlift.server.http.responses import ignored_header
from chairlift.server.schema.logprobs import check_scored
from chairlift.server.schema.response_format import schema_text
from chairlift.server.service import Service, service_of


@dataclass(slots=True)
class Delta:
    """What is new of one answer; its content comes before its calls."""

    index: int
    """Which of the `n` answers."""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    """One a call at most."""
    logprobs: list[TokenLogprobs] | None = None
    """Of the tokens since the last one, shown or not, if they were asked for."""
    finish_reason: str | None = None
    """`stop`, `length` or `tool_calls` with the answer's last."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""

    @property
    def is_plain(self) -> bool:
        """Whether there is content and nothing else."""
        return bool(self.content) and not self.calls and self.logprobs is None and self.finish_reason is None


@dataclass(slots=True)
class Call:
    """A call that the model made; `arguments` is the text of a JSON object, unless the model wrote or left it otherwise."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """One whole answer."""

    content: str | None = None
    """None where there are only calls."""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatCompletion:
    """The assistant's answers to one conversation.

    `generation` has their head and, as they come, their usage; `headers` belong to the HTTP response.
    """

    def __init__(self, generation: Generation, reading: _Reading, answers: int, headers: dict[str, str]) -> None:
        self.generation = generation
        self.headers = headers
        self.prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
        """Of the prompt, once the first answer began, if they were asked for."""
        self._reading = reading
        self._answers = answers

    @classmethod
    async def begin(cls, request: Request, wanted: ChatRequest, ignored: list[str], *, kind: str, prefix: str, stream: bool) -> Self:
        """Checks everything and makes the prompt; `kind` is the answers' object and `prefix` begins their id.

        `ignored` are names of fields without effect. Raises InvalidRequest or ApiError; the engine has not been asked yet.
        """
        service = service_of(request)
        service.check_model(wanted.model)
        scheduling = wanted.scheduling(request.state.tenant, request.headers)
        params, offer = wanted.params(service.default_sampling), wanted.offer()
        try:
            prompt, syntax = await _prompt(service, wanted, offer)
            controls = service.engine.tokenizer.control_texts if offer else ()
            reading = _Reading(offer, syntax, controls, hide=params.skip_special_tokens)
            if reading.controls:
                params = replace(params, skip_special_tokens=False)
            if offer:
                params = replace(params, structured_output=_form(service, reading, params.structured_output))
            check_scored([prompt], params)
            generation = Generation(
                service,
                [prompt],
                params,
                scheduling,
                context=request.state.context,
                ticket=request.state.ticket,
                kind=kind,
                prefix=prefix,
                request_id=wanted.request_id or request.state.context.request_id,
                stream=stream,
            )
        except InvalidRequest as error:
            if error.param == "prompt":  # as the engine calls what came as messages
                error.param = "messages"
            raise
        return cls(generation, reading, params.n, ignored_header(ignored))

    async def deltas(self) -> AsyncGenerator[Delta]:
        """What is new, as it comes; raises what the engine raises. Leaving early ends the request: use `contextlib.aclosing`."""
        choices = [_Choice(index, self._reading) for index in range(self._answers)]
        async with aclosing(self.generation.outputs()) as outputs:
            async for index, output in outputs:
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs = output.prompt_logprobs
                for delta in choices[index].take(output):
                    yield delta

    async def whole(self) -> list[Answer]:
        """Every answer, put together; raises what the engine raises."""
        answers = [Answer() for _ in range(self._answers)]
        contents: list[list[str]] = [[] for _ in answers]
        arguments: list[list[list[str]]] = [[] for _ in answers]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                answer = answers[delta.index]
                contents[delta.index].append(delta.content)
                for call in delta.calls:
                    if call.id is not None and call.name is not None:
                        answer.calls.append(Call(call.id, call.name))
                        arguments[delta.index].append([])
                    arguments[delta.index][call.position].append(call.arguments)
                if delta.logprobs is not None:
                    answer.logprobs = answer.logprobs or []
                    answer.logprobs += delta.logprobs
                if delta.finish_reason is not None:
                    answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        for answer, content, parts in zip(answers, contents, arguments, strict=True):
            text = "".join(content)
            answer.content = text if text or not answer.calls else None
            for made, part in zip(answer.calls, parts, strict=True):
                made.arguments = "".join(part)
        return answers


class _Reading:
    """How a turn's text is read: what may be called in it, and how the model writes that."""

    def __init__(self, offer: Offer, syntax: type[Syntax], controls: Sequence[str], *, hide: bool) -> None:
        """`controls` are the texts of the vocabulary's control tokens; those that are no marks of calls are not shown if `hide`."""
        self.offer = offer
        self.syntax = syntax
        marks = (*syntax.marks, *syntax.inner_marks)
        self.controls = [text for text in controls if text in marks]
        """The marks of calls that are control tokens: then those have to be in the text."""
        hidden = [re.escape(text) for text in controls if text not in marks]
        # Without marks among them the text has no control tokens, or those that the client wants to see.
        self._hidden = re.compile("|".join(hidden)) if hide and hidden and self.controls else None

    def parser(self) -> Syntax | None:
        """A parser for one answer; None if nothing can be called in it."""
        return self.syntax([tool.function.name for tool in self.offer.tools]) if self.offer else None

    def shown(self, text: str) -> str:
        """What is to be shown of a text, in which no token is cut in two."""
        return self._hidden.sub("", text) if self._hidden else text


async def prompt_of(service: Service, wanted: ChatRequest) -> list[int]:
    """The tokens of a conversation as the model is given them; raises InvalidRequest."""
    return (await _prompt(service, wanted, wanted.offer()))[0]


async def _prompt(service: Service, wanted: ChatRequest, offer: Offer) -> tuple[list[int], type[Syntax]]:
    """The prompt's tokens, and how calls are written in the answer."""
    conversation, variables, syntax = await asyncio.to_thread(_told, service, wanted, offer)
    return wanted.cut(await service.render(conversation, **variables)), syntax


def _form(service: Service, reading: _Reading, wanted: StructuredOutput | None) -> StructuredOutput | None:
    """The form of an answer that may call functions, or has to, where the client `wanted` content of some form; None if any will do."""
    offer, tokenizer = reading.offer, service.engine.tokenizer
    strict = any(tool.function.strict for tool in offer.tools)
    if not (offer.must or wanted or strict):
        return None
    free = not (offer.must or wanted)
    tools = {tool.function.name: None if free and not tool.function.strict else tool.function.parameters for tool in offer.tools}
    for name, schema in tools.items():
        schema_text(schema or {}, "tools", f"the schema of {name}'s parameters")
        if (schema or {}).get("type", "object") != "object":
            raise InvalidRequest(f'the schema of {name}\'s parameters must have "type": "object"', param="tools")
    control = {mark: tokenizer.encode(mark, add_special_tokens=False)[0] for mark in reading.controls}
    form = reading.syntax.form(tokenizer.template.source)
    if not free:
        return calls_grammar(form, tools, control, several=offer.several, instead=None if offer.must else wanted)
    return free_calls_grammar(reading.syntax.marks[0] if form.begin else "", form, tools, control, several=offer.several)


def _told(service: Service, wanted: ChatRequest, offer: Offer) -> tuple[list[dict[str, Any]], dict[str, Any], type[Syntax]]:
    """The conversation and the variables for the chat template, which may know tools or not, and how it writes calls."""
    conversation, variables = wanted.conversation(), wanted.variables()
    tools = [tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in offer.tools]
    if wanted.documents and not service.engine.tokenizer.template.uses("documents"):
        raise InvalidRequest("this model's chat template has no place for documents: put them into a message", param="documents")
    if not tools and not any(turn["role"] == "tool" or "tool_calls" in turn for turn in conversation):
        return conversation, variables, Hermes
    template = service.engine.tokenizer.template
    if not template.uses("tools"):
        return told(conversation, tools), variables, Hermes
    parser = service.tool_call_parser
    syntax = syntax_of(template.source) if parser == "auto" else SYNTAXES[parser]
    return conversation, {**variables, "tools": tools} if tools else variables, syntax


class _Choice:
    """One answer as it is read."""

    def __init__(self, index: int, reading: _Reading) -> None:
        self._index = index
        self._offer = reading.offer
        self._shown = reading.shown
        self._parser = reading.parser()
        self._called = False
        self._logprobs: list[TokenLogprobs] = []

    def take(self, output: RequestOutput) -> list[Delta]:
        """What is new with the next output: nothing, if that was half a character, or text that may become a stop string or a call."""
        if output.logprobs:
            self._logprobs += output.logprobs
        deltas = self._read(output) if self._parser else [Delta(self._index, output.text)] if output.text else []
        if output.finish_reason and not deltas:
            deltas.append(Delta(self._index))
        if not deltas:
            return deltas
        if self._logprobs:
            deltas[0].logprobs, self._logprobs = self._logprobs, []
        if output.finish_reason:
            last = deltas[-1]
            # OpenAI says `stop` where the client itself chose the function.
            called = self._called and output.finish_reason == "stop" and not self._offer.named
            last.finish_reason = "tool_calls" if called else output.finish_reason
            last.stop_reason = output.stop_reason
        return deltas

    def _read(self, output: RequestOutput) -> list[Delta]:
        """Text, as content and calls."""
        assert self._parser is not None
        news = self._parser.push(self._shown(output.text))
        if output.finish_reason:
            news += self._parser.end()
        deltas: list[Delta] = []
        for piece in news:
            if isinstance(piece, str):
                if not deltas or deltas[-1].calls:
                    deltas.append(Delta(self._index))
                deltas[-1].content += piece
            elif self._offer.several or piece.position == 0:
                self._called = True
                if not deltas:
                    deltas.append(Delta(self._index))
                _add(deltas[-1].calls, piece)
        return deltas


def _add(calls: list[CallDelta], piece: CallDelta) -> None:
    """Puts a call's next piece to what is new, as one with what is new of the same call."""
    if calls and calls[-1].position == piece.position:
        calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.arguments)
    else:
        calls.append(piece)
