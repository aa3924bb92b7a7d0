"""Grammars of outputs that begin with reasoning: which outputs they allow."""

import json

import pytest

from chairlift.grammar.source import ANYTHING, ReasoningFormat, after_reasoning, calls_grammar, free_calls_grammar
from chairlift.sampling import StructuredOutput
from chairlift.server.chat.tools.formats import Hermes

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
SCHEMA = StructuredOutput("json", json.dumps(CITY))
TEXT = ReasoningFormat("<think>", "</think>")
# The vocabulary's only control token stands for an end mark that is one token.
TOKEN, IDS = ReasoningFormat("<think>", "[CALL]"), {"[CALL]": 268}
EOS = 267


@pytest.mark.parametrize("form", [TEXT, TOKEN])
@pytest.mark.parametrize(
    ("text", "opened", "closed"),
    [
        ('It {is} [1, 2].END\n\n{"city":"Bern"}', True, False),
        ('END{"city":"Bern"}', True, False),
        ('a <think> < b</ENDEND{"city":"Bern"}', False, False),
        ('It is.END{"town":"Bern"}', False, False),
        ("It is.END", False, False),
        ("It is.", False, False),
        ('{"city":"Bern"}', False, True),
        ('<think>It is.END{"city":"Bern"}', True, True),
        ('<think>{"city":"Bern"}', False, False),
    ],
)
def test_a_schema_holds_after_the_reasoning(takes, form, text, opened, closed):
    text = text.replace("END", form.end)
    for begun, expected in ((True, opened), (False, closed)):
        assert takes(after_reasoning(SCHEMA, form, IDS, [EOS], opened=begun), text) == expected


def test_a_model_that_omits_the_start_mark(takes):
    implicit = ReasoningFormat("<think>", "</think>", implicit=True)
    grammar = after_reasoning(SCHEMA, implicit, {}, [EOS], opened=False)
    assert takes(grammar, 'It is.</think>{"city":"Bern"}')
    assert takes(grammar, '<think>It is.</think>{"city":"Bern"}')
    assert not takes(grammar, '{"city":"Bern"}')


@pytest.mark.parametrize("kind", [("regex", "[0-9]+"), ("choice", '["7", "12"]'), ("grammar", "start: reasoning\nreasoning: /[0-9]/+")])
def test_every_kind_of_form_holds_after_the_reasoning(takes, kind):
    grammar = after_reasoning(StructuredOutput(*kind), TEXT, {}, [EOS], opened=True)
    assert takes(grammar, "seven</think>12")
    assert not takes(grammar, "seven</think>x")
    assert not takes(grammar, "12")


def test_a_spent_budget_forces_the_end_mark(takes):
    grammar = after_reasoning(StructuredOutput("grammar", ANYTHING), TOKEN, IDS, [EOS], opened=True, budget=4, complete=True)
    assert takes(grammar, "1234[CALL]hello [CALL] <think>")
    assert takes(grammar, "[CALL]")
    assert not takes(grammar, "12345[CALL]")
    assert not takes(grammar, "123")
    none = after_reasoning(SCHEMA, TOKEN, IDS, [EOS], opened=False, budget=0)
    assert takes(none, '<think>[CALL]{"city":"Bern"}')
    assert not takes(none, '<think>1[CALL]{"city":"Bern"}')


def test_marks_around_the_answer(takes):
    form = ReasoningFormat("<a>", "[CALL]", after_end="<start>", answer="<final>")
    grammar = after_reasoning(SCHEMA, form, IDS, [EOS], opened=False)
    assert takes(grammar, '<a>It is.[CALL]<start><final>{"city":"Bern"}')
    assert takes(grammar, '<final>{"city":"Bern"}')
    assert not takes(grammar, '{"city":"Bern"}')


def test_calls_after_reasoning_that_mentions_calls(takes):
    call_format, tools = Hermes.call_format(""), {"weather": CITY}
    call = '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call>'
    wrong = call.replace("city", "town")
    forced = calls_grammar(call_format, tools, {}, several=False)
    free = free_calls_grammar("<tool_call>", call_format, tools, {}, several=True)
    for grammar, text in ((forced, ""), (free, "I look.\n")):
        grammar = after_reasoning(grammar, TEXT, {}, [EOS], opened=True, complete=True)
        assert takes(grammar, f"Shall I {wrong}?</think>\n{text}{call}")
        assert not takes(grammar, f"Shall I?</think>\n{text}{wrong}")
