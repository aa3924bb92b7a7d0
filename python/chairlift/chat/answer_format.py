"""The format of a request's answers: how they are parsed, and the grammar that constrains them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from chairlift.chat.functions import ToolSpec
from chairlift.chat.model import ChatModel
from chairlift.chat.reasoning import Reasoning, ReasoningState
from chairlift.chat.tools.argument_types import argument_types
from chairlift.chat.tools.parser import ToolParser
from chairlift.errors import InvalidRequest
from chairlift.grammar.json_schema import checked_schema
from chairlift.grammar.source import ANYTHING, after_reasoning, calls_grammar, free_calls_grammar
from chairlift.sampling import ReasoningBudget, StructuredOutput

_ONE_CALL = "only supports single tool-calls at once"
"""What Llama 3's chat templates say when they refuse a conversation in which the model made several calls at once."""


class AnswerFormat:
    """How to parse the answers of a request: reasoning, tools, and the control tokens to hide."""

    def __init__(
        self,
        model: ChatModel,
        tool_spec: ToolSpec,
        parser_type: type[ToolParser],
        reasoning: Reasoning | None,
        *,
        hide: bool,
        show: bool = True,
    ) -> None:
        """`hide` removes control tokens that are not marks from the text, `show` includes the reasoning in the answer."""
        self.model = model
        if tool_spec and _ONE_CALL in model.tokenizer.template.source:
            tool_spec = replace(tool_spec, parallel=False)
        self.tool_spec = tool_spec
        self.parser_type = parser_type
        self.reasoning = reasoning
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
        control_texts = model.tokenizer.control_texts if self.marks else ()
        self.control_marks = [text for text in control_texts if any(text in mark for mark in self.marks)]
        """The marks, or parts of marks, that are control tokens: the engine must not remove them from the text."""
        # If no mark is a control token, the engine removes control tokens itself.
        hides = hide and bool(self.control_marks)
        self._hidden_texts = [text for text in control_texts if text not in self.control_marks] if hides else []
        self._hidden = re.compile("|".join(map(re.escape, self._hidden_texts)))
        self._hidden_starts = frozenset(text[0] for text in self._hidden_texts)
        self._longest_hidden = max(map(len, self._hidden_texts), default=1)

    def call_parser(self) -> ToolParser | None:
        """Returns a parser of tool calls for one choice; None if there are no tools."""
        return self.parser_type(self._names, types=self._types) if self._parses_calls else None

    def visible(self, text: str, *, final: bool) -> tuple[str, str]:
        """Removes hidden control tokens; returns the text and, unless it is `final`, its end if that may begin one.

        Text arrives in whole tokens, but where it may begin a stop string it is cut anywhere.
        """
        if not self._hidden_texts:
            return text, ""
        text = self._hidden.sub("", text)
        first = len(text) if final else max(0, len(text) - self._longest_hidden + 1)
        for start in range(first, len(text)):
            # There may be thousands of control tokens, which all begin with the same few characters.
            if text[start] in self._hidden_starts and any(one.startswith(text[start:]) for one in self._hidden_texts):
                return text[:start], text[start:]
        return text, ""

    def mark_ids(self) -> dict[str, int]:
        """Returns the marks, and parts of marks, that are single tokens, with their ids."""
        tokenizer = self.model.tokenizer
        encoded = {mark: tokenizer.encode(mark, add_special_tokens=False) for mark in (*self.control_marks, *self.marks)}
        return {mark: ids[0] for mark, ids in encoded.items() if len(ids) == 1}


def answer_grammar(form: AnswerFormat, content: StructuredOutput | None, budget: int | None, relaxed: list[str]) -> StructuredOutput | None:
    """Returns the grammar of an answer; None if it is unconstrained.

    `content` is the grammar that the client requested for the answer, `budget` the maximum of reasoning tokens. Appends to `relaxed` the
    names of what is not enforced.
    """
    tool_spec, reasoning = form.tool_spec, form.reasoning
    mark_ids = form.mark_ids()
    structure = _tool_grammar(form, mark_ids, content, relaxed) if tool_spec else content
    may_reason = reasoning is not None and reasoning.state is not ReasoningState.OVER
    if budget is not None and not may_reason:
        relaxed.append("thinking_token_budget")
        budget = None
    if reasoning is None or not may_reason or (structure is None and budget is None):
        return structure
    model = form.model
    ends = [token for token in model.tokenizer.eos_token_ids if token < model.vocab_size]
    marks = reasoning.format
    bounded = after_reasoning(
        structure or StructuredOutput("grammar", ANYTHING, "thinking_token_budget"),
        marks,
        mark_ids,
        ends,
        opened=reasoning.state is ReasoningState.OPEN,
        complete=structure is not content or structure is None,
    )
    if budget is None:
        return bounded
    opened = marks.implicit or reasoning.state is ReasoningState.OPEN
    forced = marks.end + marks.after_end + ("" if tool_spec else marks.answer)
    return bounded._replace(
        budget=ReasoningBudget(
            budget,
            start="" if opened else marks.start,
            end=marks.end,
            end_tokens=tuple(model.tokenizer.encode(forced, add_special_tokens=False)),
            again=marks.after_end + marks.start if marks.repeats else "",
        )
    )


def _tool_grammar(
    form: AnswerFormat, mark_ids: dict[str, int], content: StructuredOutput | None, relaxed: list[str]
) -> StructuredOutput | None:
    """Returns the grammar of an answer that may or must contain tool calls; None if the answer is unconstrained.

    `content` is the grammar that the client requested for an answer without calls. Appends to `relaxed` the paths of schema keywords that
    are not enforced.
    """
    tool_spec = form.tool_spec
    strict = any(tool.strict for tool in tool_spec.tools)
    if not (tool_spec.required or content or strict):
        return None
    free = not (tool_spec.required or content)
    schemas = {tool.name: None if free and not tool.strict else tool.arguments_schema() for tool in tool_spec.tools}
    for name, schema in schemas.items():
        if schema is not None:
            if schema.get("type") not in (None, "object"):
                raise InvalidRequest(f'the schema of {name}\'s parameters must have "type": "object"', param="tools")
            text, paths = checked_schema(schema, "tools", f"tools.{name}", close=True)  # a function takes no other arguments
            schemas[name] = json.loads(text)
            relaxed += [f"tools.{name}{path}" for path in paths]
    call_format = form.parser_type.call_format(form.model.tokenizer.template.source)
    if not free:
        instead = None if tool_spec.required else content
        return calls_grammar(call_format, schemas, mark_ids, several=tool_spec.parallel, instead=instead)
    if not call_format.differs_from_content:
        relaxed += [f"tools.{tool.name}.strict" for tool in tool_spec.tools if tool.strict]
        return None
    trigger = next((mark for mark in form.parser_type.marks if call_format.begin.startswith(mark)), "")
    return free_calls_grammar(trigger, call_format, schemas, mark_ids, several=tool_spec.parallel)
