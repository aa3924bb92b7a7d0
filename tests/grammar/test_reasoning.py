"""Grammars of outputs that begin with reasoning: which outputs they allow."""

import json

import pytest

from chairlift.chat.tools.formats import Hermes
from chairlift.grammar.source import ANYTHING, ReasoningFormat, after_reasoning, calls_grammar, free_calls_grammar
from chairlift.sampling import ReasoningBudget, StructuredOutput
from chairlift.tokenizer import Tokenizer

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
def test_a_schema_holds_after_the_reasoning(answers, form, text, opened, closed):
    text = text.replace("END", form.end)
    for begun, expected in ((True, opened), (False, closed)):
        assert answers(after_reasoning(SCHEMA, form, IDS, [EOS], opened=begun), text) == expected


def test_a_model_that_omits_the_start_mark(answers):
    implicit = ReasoningFormat("<think>", "</think>", implicit=True)
    grammar = after_reasoning(SCHEMA, implicit, {}, [EOS], opened=False)
    assert answers(grammar, 'It is.</think>{"city":"Bern"}')
    assert answers(grammar, '<think>It is.</think>{"city":"Bern"}')
    assert not answers(grammar, '{"city":"Bern"}')


@pytest.mark.parametrize("kind", [("regex", "[0-9]+"), ("choice", '["7", "12"]'), ("grammar", "start: reasoning\nreasoning: /[0-9]/+")])
def test_every_kind_of_form_holds_after_the_reasoning(answers, kind):
    grammar = after_reasoning(StructuredOutput(*kind), TEXT, {}, [EOS], opened=True)
    assert answers(grammar, "seven</think>12")
    assert not answers(grammar, "seven</think>x")
    assert not answers(grammar, "12")


FREE = StructuredOutput("grammar", ANYTHING)


@pytest.fixture(scope="module")
def limited(byte_model):
    """Makes grammars for reasoning with a budget."""
    tokenizer = Tokenizer(byte_model)

    def grammar(structure, form, tokens, *, opened=False, again=""):
        limit = ReasoningBudget(tokens, "" if opened else form.start, form.end, tuple(tokenizer.encode(form.end)), again)
        return after_reasoning(structure, form, IDS, [EOS], opened=opened, complete=structure == FREE)._replace(budget=limit)

    return grammar


@pytest.mark.parametrize("form", [TEXT, TOKEN])
@pytest.mark.parametrize(
    ("text", "allowed"),
    [("1234ENDhello END <think>", True), ("END", True), ("12END", True), ("12345END", False), ("123", False), ("1234 END", False)],
)
def test_a_spent_budget_forces_the_end_mark(answers, limited, form, text, allowed):
    assert answers(limited(FREE, form, 4, opened=True), text.replace("END", form.end)) == allowed


@pytest.mark.parametrize("form", [TEXT, TOKEN])
def test_the_budget_begins_with_the_reasoning(answers, limited, form):
    for text, allowed in [('<think>END{"city":"Bern"}', True), ('<think>1END{"city":"Bern"}', False), ('{"city":"Bern"}', True)]:
        assert answers(limited(SCHEMA, form, 0), text.replace("END", form.end)) == allowed
    assert answers(limited(FREE, form, 1), "<thin air> and <think> much more text")
    assert answers(limited(FREE, form, 1), f" <think>1{form.end} much more text")
    assert not answers(limited(FREE, form, 1), f" <think>12{form.end} much more text")


def test_a_budget_lets_a_character_end(answers, limited):
    for text, allowed in [("12\U0001f642</think>{}", True), ("12\U0001f6423</think>{}", False)]:
        assert answers(limited(StructuredOutput("json_object"), TEXT, 3, opened=True), text) == allowed


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("123[CALL]<start><think>4[CALL]answer", True),
        ("123[CALL]<start><think>45[CALL]answer", False),
        ("1[CALL]<start><final><think>345", True),
    ],
)
def test_reasoning_that_begins_again_has_the_same_budget(answers, limited, text, allowed):
    assert answers(limited(FREE, TOKEN, 4, opened=True, again="<start><think>"), text) == allowed
    assert answers(limited(FREE, TOKEN, 4, opened=True), text)


def test_marks_around_the_answer(answers):
    form = ReasoningFormat("<a>", "[CALL]", after_end="<start>", answer="<final>")
    grammar = after_reasoning(SCHEMA, form, IDS, [EOS], opened=False)
    assert answers(grammar, '<a>It is.[CALL]<start><final>{"city":"Bern"}')
    assert answers(grammar, '<final>{"city":"Bern"}')
    assert not answers(grammar, '{"city":"Bern"}')


def test_calls_after_reasoning_that_mentions_calls(answers):
    call_format, tools = Hermes.call_format(""), {"weather": CITY}
    call = '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call>'
    wrong = call.replace("city", "town")
    forced = calls_grammar(call_format, tools, {}, several=False)
    free = free_calls_grammar("<tool_call>", call_format, tools, {}, several=True)
    for grammar, text in ((forced, ""), (free, "I look.\n")):
        grammar = after_reasoning(grammar, TEXT, {}, [EOS], opened=True, complete=True)
        assert answers(grammar, f"Shall I {wrong}?</think>\n{text}{call}")
        assert not answers(grammar, f"Shall I?</think>\n{text}{wrong}")
