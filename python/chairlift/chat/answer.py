"""A model's answer in a conversation: its reasoning, content and tool calls, as increments or whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chairlift.chat.answer_format import AnswerFormat
from chairlift.chat.reasoning import ReasoningParser, ReasoningState, ReasoningTokens
from chairlift.chat.tools.custom import CustomCalls
from chairlift.chat.tools.parser import ToolCallDelta
from chairlift.outputs import RequestOutput, TokenLogprobs, ToolCall


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


class ChoiceBuilder:
    """Joins the increments of one choice."""

    def __init__(self) -> None:
        self._choice = ChatChoice()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: Delta) -> None:
        """Appends the next increment."""
        choice = self._choice
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.id is not None and call.name is not None:
                choice.calls.append(ToolCall(call.id, call.name, custom=call.custom))
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)
        if delta.logprobs is not None:
            choice.logprobs = choice.logprobs or []
            choice.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def choice(self) -> ChatChoice:
        """Returns the choice so far."""
        text = "".join(self._content)
        self._choice.content = text if text or not self._choice.calls else None
        self._choice.reasoning = "".join(self._reasoning) or None
        for call, parts in zip(self._choice.calls, self._arguments, strict=True):
            call.arguments = "".join(parts)
        return self._choice


class WholeCalls:
    """Joins the increments of each call of one choice."""

    def __init__(self) -> None:
        self._call: ToolCallDelta | None = None
        """The first increment of the call in progress."""
        self._arguments: list[str] = []

    def push(self, delta: Delta) -> list[ToolCallDelta]:
        """Takes the next increment; returns the calls that have ended. A call ends when the next one begins, and with the answer."""
        ended: list[ToolCallDelta] = []
        for part in delta.calls:
            if part.name is not None:
                ended += self._end()
                self._call = part
            self._arguments.append(part.arguments)
        return ended + self._end() if delta.finish_reason else ended

    def _end(self) -> list[ToolCallDelta]:
        if self._call is None:
            return []
        call, self._call = replace(self._call, arguments="".join(self._arguments)), None
        self._arguments.clear()
        return [call]


class AnswerParser:
    """Separates the engine's outputs of one answer into reasoning, content and tool calls."""

    def __init__(self, index: int, form: AnswerFormat) -> None:
        self.num_reasoning_tokens = 0
        self._index = index
        self._format = form
        self._tool_spec = form.tool_spec
        reasoning = form.reasoning
        piece = form.model.tokenizer.piece
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning)
        self._reasoning_tokens = None if reasoning is None else ReasoningTokens(reasoning, piece)
        self._calls = form.call_parser()
        self._custom = CustomCalls(self._tool_spec.custom)
        self._called = False
        self._arguments: list[str] = []
        """The arguments of the newest call."""
        self._cut = ""
        """The end of the text, if it may begin a control token to hide."""
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
            called = self._called and output.finish_reason == "stop" and not self._tool_spec.named and not self._is_cut(output)
            last.finish_reason = "tool_calls" if called else output.finish_reason
            last.stop_reason = output.stop_reason
        return deltas

    def _parse(self, output: RequestOutput) -> list[Delta]:
        """Separates text into reasoning, content and calls."""
        reasoning, final = "", output.finish_reason is not None
        stop = output.stop_reason if isinstance(output.stop_reason, str) else ""
        answer, self._cut = self._format.visible(self._cut + output.text, final=final)
        if self._reasoning is not None and self._reasoning_tokens is not None:
            reasoning, answer = self._reasoning.push(answer)
            if final:
                ended = self._reasoning.end(stop)
                reasoning, answer = reasoning + ended[0], answer + ended[1]
            if not self._format.shows_reasoning:
                reasoning = ""
            self.num_reasoning_tokens += self._reasoning_tokens.count(output.token_ids)
        deltas = [Delta(self._index, reasoning=reasoning)] if reasoning else []
        if self._calls is None:
            if answer and deltas:
                deltas[-1].content = answer
            elif answer:
                deltas.append(Delta(self._index, answer))
            return deltas
        parts = self._calls.push(answer)
        if final:
            held_back = self._calls.end(stop)
            # At the maximum length, text of a forced call is the beginning of one whose name is not complete.
            is_cut = self._tool_spec.required and output.finish_reason == "length"
            parts += [part for part in held_back if not (is_cut and isinstance(part, str))]
        if output.finish_reason == "stop" and self._reasoning is not None and self._reasoning.state is ReasoningState.OPEN:
            parts += self._calls_after_thought(self._reasoning.thought, self._calls.num_calls)
        for part in parts:
            if isinstance(part, str):
                self._append_calls(deltas, self._custom.end())
                if not deltas or deltas[-1].calls:
                    deltas.append(Delta(self._index))
                deltas[-1].content += part
            elif self._tool_spec.parallel or part.index == 0:
                self._called = True
                if part.id is not None:
                    self._arguments.clear()
                self._arguments.append(part.arguments)
                self._append_calls(deltas, self._custom.push(part))
        if final:
            self._append_calls(deltas, self._custom.end())
        return deltas

    def _calls_after_thought(self, thought: str, index: int) -> list[ToolCallDelta]:
        """Returns the calls at the end of the reasoning `thought`, which has no end mark, from `index` on.

        Some models forget the mark before a call, which ends the answer.
        """
        parser = self._format.call_parser()
        if parser is None:
            return []
        calls: list[ToolCallDelta] = []
        for part in (*parser.push(thought), *parser.end()):
            if isinstance(part, str):
                calls.clear()
            else:
                calls.append(part)
        return [replace(call, index=index + call.index - calls[0].index) for call in calls]

    def _is_cut(self, output: RequestOutput) -> bool:
        """Whether a stop string or a stop token has ended the answer within a call's arguments."""
        if output.stop_reason is None:
            return False
        try:
            json.loads("".join(self._arguments))
        except ValueError:
            return True
        except RecursionError:
            pass
        return False

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
