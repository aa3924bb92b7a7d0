"""Calls that a model may make, or not: which answers a grammar lets through."""

import json

import pytest

from chairlift.chat.tools.formats import HERMES_OPEN, MISTRAL_MARK, TOOL_PARSERS, Hermes, Llama, Mistral
from chairlift.chat.tools.parser import ToolCallDelta
from chairlift.errors import InvalidRequest
from chairlift.grammar.source import calls_grammar, free_calls_grammar
from chairlift.sampling import StructuredOutput

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOLS = {"weather": CITY, "stop": None}


def compact(value):
    return json.dumps(value, separators=(",", ":"))


GOOD, STOP, WRONG = (
    f'<tool_call>\n{{"name": "{name}", "arguments": {compact(arguments)}}}\n</tool_call>'
    for name, arguments in (("weather", {"city": "Bern"}), ("stop", {"a": 1}), ("weather", {"town": "Bern"}))
)


@pytest.mark.parametrize(
    ("text", "several", "one"),
    [
        ("Hello, a < b <tool\n", True, True),
        ("", True, True),
        (GOOD, True, True),
        (f"I look.\n{GOOD}", True, True),
        (f"{GOOD}\n{STOP} bye", True, False),
        (f"{GOOD} bye", True, False),
        (WRONG, False, False),
        (f"Hello {GOOD}{WRONG}", False, False),
        (f"{HERMES_OPEN}\nhello", False, False),
        (GOOD.replace("weather", "unknown"), False, False),
    ],
)
def test_a_model_that_is_free_to_call_calls_as_it_should(answers, text, several, one):
    call_format = Hermes.call_format("")
    assert answers(free_calls_grammar(HERMES_OPEN, call_format, TOOLS, {}, several=True), text) == several
    assert answers(free_calls_grammar(HERMES_OPEN, call_format, TOOLS, {}, several=False), text) == one


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Hello {}", True),
        ("", True),
        ('{"name": "weather", "parameters": {"city":"Bern"}}', True),
        ('{"name": "weather", "parameters": {"city":"Bern"}}; {"name": "stop", "parameters": {}}', True),
        ('{"name": "weather", "parameters": {"town":"Bern"}}', False),
        ("  {}", False),
        ('[{"name": "weather", "parameters": {"town":"Bern"}}]', False),
    ],
)
def test_calls_without_a_mark(answers, text, good):
    assert answers(free_calls_grammar("", Llama.call_format(""), TOOLS, {}, several=True), text) == good


@pytest.mark.parametrize("template", ["", "```json", "[ARGS]", "<|tool_call_start|>", "<|tool_call>"])
@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_every_parser_reads_the_calls_that_its_grammar_allows(answers, name, template):
    parser_type = TOOL_PARSERS[name]
    form = parser_type.call_format(template)

    def written(*calls):
        each = [f"{form.before}{tool}{form.between}{compact(arguments)}{form.after}" for tool, arguments in calls]
        return form.begin + form.separator.join(each) + form.end

    two = written(("weather", {"city": "Bern"}), ("stop", {"a": [1, None]}))
    forced = calls_grammar(form, TOOLS, {}, several=True)
    assert answers(forced, two)
    assert not answers(forced, written(("weather", {"town": "Bern"})))
    parser = parser_type(list(TOOLS))
    parts = parser.push(two) + parser.end()
    assert all(isinstance(part, ToolCallDelta) for part in parts)
    assert [part.name for part in parts if part.name] == ["weather", "stop"]
    arguments = ["".join(part.arguments for part in parts if part.index == index) for index in (0, 1)]
    assert [json.loads(one) for one in arguments] == [{"city": "Bern"}, {"a": [1, None]}]
    if form.begin:
        either = calls_grammar(form, TOOLS, {}, several=True, instead=StructuredOutput("json", json.dumps(CITY)))
        assert answers(either, form.content + '{"city":"Bern"}')
        assert answers(either, two)
    if form.differs_from_content:
        mark = next((mark for mark in parser_type.marks if form.begin.startswith(mark)), "")
        free = free_calls_grammar(mark, form, TOOLS, {}, several=True)
        assert answers(free, two)
        assert answers(free, "Hello.")
        assert not answers(free, written(("weather", {"town": "Bern"})))


def test_marks_that_are_control_tokens(answers):
    for template, good in (
        ("", 'So [CALL][{"name": "weather", "arguments": {"city":"Bern"}}, {"name": "stop", "arguments": {}}]'),
        ("[ARGS]", 'So [CALL]weather[ARGS]{"city":"Bern"}[CALL]stop[ARGS]{}'),
    ):
        call_format = Mistral.call_format(template)
        # The tiny vocabulary's own mark stands for the model's.
        renamed = type(call_format)(**{name: getattr(call_format, name).replace(MISTRAL_MARK, "[CALL]") for name in call_format.__slots__})
        free = free_calls_grammar("[CALL]", renamed, TOOLS, {"[CALL]": 268}, several=True)
        assert answers(free, good)
        assert answers(free, "no calls")
        assert not answers(free, good.replace("city", "town"))


def test_an_answer_that_is_calls_or_has_a_form(answers):
    call_format = calls_grammar(Hermes.call_format(""), TOOLS, {}, several=True, instead=StructuredOutput("json", json.dumps(CITY)))
    assert answers(call_format, '{"city":"Bern"}')
    assert answers(call_format, f"{GOOD}\n{STOP}")
    assert not answers(call_format, "{}")
    assert not answers(call_format, "hello")
    assert not answers(call_format, WRONG)
    anything = calls_grammar(Hermes.call_format(""), TOOLS, {}, several=False, instead=StructuredOutput("json_object"))
    assert answers(anything, '{"a":[1]}')
    assert answers(anything, GOOD)


@pytest.mark.parametrize(("syntax", "kind"), [(Hermes, "regex"), (Llama, "json")])
def test_forms_that_an_answer_cannot_have_beside_calls(syntax, kind):
    with pytest.raises(InvalidRequest, match="leave out either") as refusal:
        calls_grammar(syntax.call_format(""), TOOLS, {}, several=False, instead=StructuredOutput(kind, "a", "structured_outputs"))
    assert refusal.value.param == "structured_outputs"
