"""Converts structured-output requests and tool calls to grammars for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from chairlift.errors import InvalidRequest
from chairlift.sampling import JSON_STRUCTURES, MAX_GRAMMAR, StructuredOutput

_TOOL = "// tool "
"""Begins the comment that names the tool of a rule."""

_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace between JSON tokens where a request allows it. It is bounded, because small models tend to repeat it without end."""


def source(structure: StructuredOutput) -> str:
    """Returns what `GrammarMatcher` compiles. Raises ValueError for an invalid JSON schema or list of choices."""
    answer = _answer_source(structure)
    if not structure.before:
        return answer
    [grammar] = json.loads(answer)["grammars"] if structure.kind in JSON_STRUCTURES else [{"lark_grammar": answer}]
    return json.dumps({"grammars": [{"lark_grammar": structure.before}, {**grammar, "name": "answer"}]})


def _answer_source(structure: StructuredOutput) -> str:
    """Lark, or llguidance's list of one grammar for a JSON schema."""
    from chairlift._core import GrammarMatcher

    match structure.kind:
        case "json":
            return _schema_source(json.loads(structure.text), structure.disable_any_whitespace)
        case "json_object":
            return _schema_source({"type": "object"}, structure.disable_any_whitespace)
        case "regex":
            return GrammarMatcher.regex(structure.text)
        case "choice":
            choices = json.loads(structure.text)
            if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
                raise ValueError("a choice is a JSON list of strings, and not empty")
            # One terminal is one automaton, in which thousands of choices are cheap. In a rule, each choice would be an item of the parser.
            return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}"
    return structure.text


def _schema_source(schema: Any, compact: bool | None) -> str:
    return json.dumps({"grammars": [{"json_schema": _spaced(schema, compact)}]})


def _spaced(schema: Any, compact: bool | None = None) -> dict[str, Any]:
    """Returns a JSON schema that says which whitespace may stand between JSON tokens.

    None if `compact`. Otherwise what the schema itself says; if it says nothing, none, or `_SPACE` if `compact` is False.
    """
    guidance = schema.get("x-guidance", {}) if isinstance(schema, Mapping) else None
    if not isinstance(guidance, Mapping):
        raise ValueError("a JSON schema must be an object, and its x-guidance too")
    if compact:
        guidance = {**guidance, "whitespace_flexible": False, "whitespace_pattern": None}
    elif guidance.keys().isdisjoint(("whitespace_flexible", "whitespace_pattern")):
        guidance = {**guidance, **({"whitespace_flexible": False} if compact is None else {"whitespace_pattern": _SPACE})}
    return {**schema, "x-guidance": guidance}


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """The syntax of a model's tool calls: `begin`, calls with `separator` between them, `end`.

    A call is `before`, the function's name, `between`, the arguments as JSON, and `after`.
    """

    begin: str = ""
    before: str = '{"name": "'
    between: str = '", "arguments": '
    after: str = "}"
    separator: str = ""
    end: str = ""
    content: str = ""
    """Text that begins an answer without calls."""

    @property
    def differs_from_content(self) -> bool:
        """Whether its beginning tells calls from an answer without calls: it does not if both have marks, or neither."""
        return bool(self.begin or self.before) and not self.content


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The syntax of a model's reasoning: `start`, the reasoning, `end`, then the answer."""

    start: str
    end: str
    after_end: str = ""
    """Text that follows `end` and is not part of the answer."""
    answer: str = ""
    """Text that begins the answer and is not part of its content."""
    dropped: tuple[str, ...] = ()
    """Further marks in the answer that are not part of its content."""
    implicit: bool = False
    """Whether the model may omit `start`."""
    repeats: bool = False
    """Whether reasoning may begin again in the answer."""


def after_reasoning(
    structure: StructuredOutput,
    form: ReasoningFormat,
    control: Mapping[str, int],
    ends: Collection[int],
    *,
    opened: bool,
    complete: bool = False,
) -> StructuredOutput:
    """Returns a grammar for reasoning followed by an answer that has the form of `structure`.

    `opened` means that the prompt has begun the reasoning; otherwise the model may begin it or not. `control` maps marks that are single
    tokens to their ids, `ends` are the tokens that end an output.
    `complete` means that `structure` includes the text that begins an answer.
    """
    rest = f"{_lark(form.after_end, control)} space"
    if form.end in control:
        others = ",".join(map(str, sorted({control[form.end], *ends})))
        reasoning = f"reasoning: <[^{others}]>* <[{control[form.end]}]>"
    else:
        reasoning = f"reasoning[suffix={json.dumps(form.end)}]: /(.|\\n)*/"
    begin = _lark(form.start, control)
    if opened:
        start = f"reasoning {rest}"
    elif form.implicit:
        start = f"({begin})? reasoning {rest}"
    else:
        start = f"({begin} reasoning {rest})?"
    answer = "" if complete else f"{_lark(form.answer, control)} "
    rules = [f"start: {start} {answer}@answer", reasoning, r"space: /[ \t\r\n]{0,8}/"]
    return structure._replace(before="\n".join(rules))


ANYTHING = "start: <[*]>*"
"""A grammar that allows every output."""


def calls_grammar(
    form: ToolCallFormat,
    tools: Mapping[str, Mapping[str, Any] | None],
    control: Mapping[str, int],
    *,
    several: bool,
    instead: StructuredOutput | None = None,
) -> StructuredOutput:
    """Returns a grammar that makes the model call one of `tools` (name to JSON schema of the arguments); one or more calls if `several`.

    `control` maps the marks of `form` that are control tokens to their ids, because the model does not produce them as text. `instead`,
    which must be a JSON kind, is an alternative: the answer may have that form and call nothing. Raises InvalidRequest if the tools'
    schemas are too long in total, if `instead` is of another kind, or if calls begin like JSON.
    """
    calls = f"calls: {_lark(form.begin, control)} {_calls(form, control, several)}"
    if instead is None:
        return _form(["start: calls", calls, *_each(form, tools, control)])
    # llguidance's lexer continues with the longest match: it would take any JSON for the beginning of a call.
    if instead.kind not in JSON_STRUCTURES or not form.begin:
        message = f"{instead.param} and tools don't go together here: leave out either, or send tool_choice none or required"
        raise InvalidRequest(message, param=instead.param)
    content = _json(json.loads(instead.text) if instead.kind == "json" else None, instead.disable_any_whitespace)
    return _form(["start: calls | content", f"content: {_lark(form.content, control)} {content}", calls, *_each(form, tools, control)])


def free_calls_grammar(
    mark: str, form: ToolCallFormat, tools: Mapping[str, Mapping[str, Any] | None], control: Mapping[str, int], *, several: bool
) -> StructuredOutput:
    """Returns a grammar for free text in which `mark` begins calls as in `calls_grammar`. Without `several`, one call ends the text.

    `form` must begin with `mark`. If `mark` is empty, the answer contains calls only if it begins with a bracket or a brace, as they do.
    Raises InvalidRequest if the tools' schemas are too long in total.
    """
    if not mark:
        rules = ["start: calls | text", r"text: /([ \t\r\n]*[^ \t\r\n\[{](.|\n)*)?/"]
        calls = f"calls: {_lark(form.begin, control)} {_calls(form, control, several)}"
        return _form([*rules, calls, *_each(form, tools, control)])
    within = f"{_lark(form.begin.removeprefix(mark), control)} {_calls(form, control, several and mark not in form.separator)}"
    # A text rule with a suffix ends at the first occurrence of the suffix, so free text cannot contain the mark.
    before = [f"before: text {_lark(mark, control)}"] if mark in control else [f"before[suffix={json.dumps(mark)}]: /(.|\\n)*/"]
    start = "start: (before calls)* text" if several else "start: before calls | text"
    return _form([start, "text: /(.|\\n)*/", *before, f"calls: {within}", *_each(form, tools, control)])


class Tag(NamedTuple):
    """A part of a text: `begin`, JSON that matches `schema`, `end`."""

    begin: str
    schema: Mapping[str, Any]
    end: str


def tags_grammar(tags: Sequence[Tag], triggers: Sequence[str], param: str) -> StructuredOutput:
    """Returns a grammar for free text in which each of `triggers` begins one of `tags`, any number of times.

    Raises InvalidRequest if a tag begins with no trigger, no tag with one of the triggers, or their schemas are too long in total.
    """
    rules, groups = [], []
    schemas = [json.dumps(_spaced(tag.schema)) for tag in tags]
    size = 0
    for index, trigger in enumerate(triggers):
        names = []
        for number, tag in enumerate(tags):
            if tag.begin.startswith(trigger):
                names.append(f"tag_{index}_{number}")
                rest = tag.begin.removeprefix(trigger)
                rules.append(f"{names[-1]}: {json.dumps(rest)} %json {schemas[number]} {json.dumps(tag.end)}")
                # Each tag has a rule for each of its triggers, which may be many times as much text as the request.
                if (size := size + len(rules[-1])) > MAX_GRAMMAR:
                    message = f"{param} has more than {MAX_GRAMMAR} characters of schemas, one for each trigger of a structure"
                    raise InvalidRequest(f"{message}: make them shorter, or send fewer", param=param)
        if not names:
            raise InvalidRequest(f"{param} has the trigger {trigger!r:.60}, with which no structure begins", param=param)
        groups.append(f"before_{index} ({' | '.join(names)})")
        rules.append(f"before_{index}[suffix={json.dumps(trigger)}]: /(.|\\n)*/")
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise InvalidRequest(f"{param} has a structure that begins with {tag.begin!r:.60}, which has no trigger", param=param)
    text = "\n".join([f"start: ({' | '.join(groups)})* text", r"text: /(.|\n)*/", *rules])
    return StructuredOutput("grammar", text, param)


def _calls(form: ToolCallFormat, control: Mapping[str, int], several: bool) -> str:
    """Returns the rule for everything after the beginning of the calls, up to their end."""
    separated = f" ({_lark(form.separator, control)} call)*" if several else ""
    return f"call{separated} {_lark(form.end, control)}"


def _each(form: ToolCallFormat, tools: Mapping[str, Mapping[str, Any] | None], control: Mapping[str, int]) -> list[str]:
    """Returns the rules for one call of each tool."""
    names = [f"call_{index}" for index in range(len(tools))]
    rules = [f"call: {' | '.join(names)}"]
    for rule, (name, schema) in zip(names, tools.items(), strict=True):
        rules.append(
            f"{rule}: {_lark(form.before + name + form.between, control)} {_json(schema)} {_lark(form.after, control)} {_TOOL}{name}"
        )
    return rules


def schemas_by_tool(structure: StructuredOutput) -> dict[str, Mapping[str, Any]]:
    """Returns the JSON schemas of a grammar of tool calls, by the tools' names."""
    schemas = {}
    for line in structure.text.splitlines():
        rule, comment, name = line.rpartition(_TOOL)
        if comment:
            schemas[name] = json.JSONDecoder().raw_decode(rule.partition("%json ")[2])[0]
    return schemas


def _json(schema: Mapping[str, Any] | None, compact: bool | None = None) -> str:
    """Returns the rule for a JSON object. Each schema is a separate document, because its references are relative to its root."""
    return "%json " + json.dumps(_spaced({"type": "object", **(schema or {})}, compact))


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
    """Returns a text as a Lark expression, with control tokens by id."""
    if not text:
        return '""'
    marks = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
    parts = [part for part in re.split(f"({marks})", text) if part] if marks else [text]
    return " ".join(f"<[{control[part]}]>" if part in control else json.dumps(part) for part in parts)
