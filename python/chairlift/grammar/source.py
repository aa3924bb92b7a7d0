"""The form that an answer must have, as llguidance reads it, and tool calls as such a form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chairlift.errors import InvalidRequest
from chairlift.sampling import MAX_GRAMMAR, StructuredOutput

_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Space between a JSON answer's tokens is free, but bounded: small models like to go on with it for ever."""


def source(structure: StructuredOutput) -> str:
    """What llguidance's matchers are made from; raises ValueError for a JSON schema or a list of choices that is none."""
    from llguidance import LLMatcher

    match structure.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(structure.text, defaults={"whitespace_pattern": _SPACE})
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults={"whitespace_pattern": _SPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(structure.text)
        case "choice":
            choices = json.loads(structure.text)
            if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
                raise ValueError("a choice is a JSON list of strings, and not empty")
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, choices))}")
    return LLMatcher.grammar_from_lark(structure.text)


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes calls: `begin`, calls with `separator` between them, `end`.

    A call is `before`, the function's name, `between`, the arguments as JSON, and `after`.
    """

    begin: str = ""
    before: str = '{"name": "'
    between: str = '", "arguments": '
    after: str = "}"
    separator: str = ""
    end: str = ""


def calls_grammar(
    form: ToolCallFormat,
    tools: Mapping[str, Mapping[str, Any] | None],
    control: Mapping[str, int],
    *,
    several: bool,
    instead: StructuredOutput | None = None,
) -> StructuredOutput:
    """A form that makes the model call one of `tools`, by name with the JSON schema of its arguments; if `several`, one or more.

    `control` has the marks in `form` for which the vocabulary has control tokens, with their ids: those are no text to the model. With
    `instead`, which has to be of a JSON kind, the answer may have that form and call nothing. Raises InvalidRequest if the tools'
    schemas are too long together, if `instead` is of another kind, or if calls begin like JSON too.
    """
    calls = f"calls: {_lark(form.begin, control)} {_calls(form, control, several)}"
    if instead is None:
        return _form(["start: calls", calls, *_each(form, tools, control)])
    # llguidance's lexer goes on with the longest text that it could read: it would take all JSON for the beginning of a call.
    if instead.kind not in ("json", "json_object") or not form.begin:
        message = f"{instead.param} and tools don't go together here: leave out either, or send tool_choice none or required"
        raise InvalidRequest(message, param=instead.param)
    content = _json(json.loads(instead.text) if instead.kind == "json" else None)
    return _form(["start: calls | content", f"content: {content}", calls, *_each(form, tools, control)])


def free_calls_grammar(
    mark: str, form: ToolCallFormat, tools: Mapping[str, Mapping[str, Any] | None], control: Mapping[str, int], *, several: bool
) -> StructuredOutput:
    """Any text, but what follows `mark`, with which `form` has to begin, is as in `calls_grammar`; if not `several`, it ends with a call.

    Without a mark ("") only an answer that begins with a brace is calls. Raises InvalidRequest if the tools' schemas are too long
    together.
    """
    if not mark:
        rules = ["start: calls | text", r"text: /([ \t\r\n]*[^ \t\r\n{](.|\n)*)?/"]
        return _form([*rules, f"calls: {_calls(form, control, several)}", *_each(form, tools, control)])
    within = f"{_lark(form.begin.removeprefix(mark), control)} {_calls(form, control, several and mark not in form.separator)}"
    # A text that ends with a suffix ends where that first appears: nothing gets past the mark.
    before = [f"before: text {_lark(mark, control)}"] if mark in control else [f"before[suffix={json.dumps(mark)}]: /(.|\\n)*/"]
    start = "start: (before calls)* text" if several else "start: before calls | text"
    return _form([start, "text: /(.|\\n)*/", *before, f"calls: {within}", *_each(form, tools, control)])


def _calls(form: ToolCallFormat, control: Mapping[str, int], several: bool) -> str:
    """What follows the beginning of calls, to their end."""
    separated = f" ({_lark(form.separator, control)} call)*" if several else ""
    return f"call{separated} {_lark(form.end, control)}"


def _each(form: ToolCallFormat, tools: Mapping[str, Mapping[str, Any] | None], control: Mapping[str, int]) -> list[str]:
    """The rules for one call of each tool."""
    names = [f"call_{index}" for index in range(len(tools))]
    rules = [f"call: {' | '.join(names)}"]
    for rule, (name, schema) in zip(names, tools.items(), strict=True):
        rules.append(f"{rule}: {_lark(form.before + name + form.between, control)} {_json(schema)} {_lark(form.after, control)}")
    return rules


def _json(schema: Mapping[str, Any] | None) -> str:
    """A JSON object by its schema. Each schema is a document of its own: that is what its references are relative to."""
    return "%json " + json.dumps({"type": "object", "x-guidance": {"whitespace_pattern": _SPACE}, **(schema or {})})


def _form(rules: list[str]) -> StructuredOutput:
    text = "\n".join(rules)
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"the schemas of the tools have {len(text)} characters together; to force a call at most {MAX_GRAMMAR} are allowed: "
            "offer fewer tools, or name the one to be called",
            param="tools",
        )
    return StructuredOutput("grammar", text, "tools")


def _lark(text: str, control: Mapping[str, int]) -> str:
    """A text in a Lark rule, with control tokens by their ids."""
    if not text:
        return '""'
    marks = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
    parts = [part for part in re.split(f"({marks})", text) if part] if marks else [text]
    return " ".join(f"<[{control[part]}]>" if part in control else json.dumps(part) for part in parts)
