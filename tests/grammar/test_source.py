"""Grammars of tool calls and tags."""

import pytest
from grammar_forms import PATIENCE, WEATHER, structure

from chairlift.errors import InvalidRequest
from chairlift.grammar.source import Tag, ToolCallFormat, calls_grammar, tags_grammar
from chairlift.sampling import MAX_GRAMMAR

HERMES = ToolCallFormat(begin="<tool_call>\n", separator="\n</tool_call>\n<tool_call>\n", end="\n</tool_call>")
LLAMA = ToolCallFormat(between='", "parameters": ')
MISTRAL = ToolCallFormat(begin="[CALL]", before="", between="", after="", separator="[CALL]")
TOOLS = {"get_weather": WEATHER, "stop": None}


@pytest.mark.parametrize(
    ("form", "several", "good", "bad"),
    [
        (HERMES, False, '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Bern"}}\n</tool_call>', '{"name": "get_weather"'),
        (LLAMA, False, '{"name": "stop", "parameters": {}}', '{"name": "go", "parameters": {}}'),
        (HERMES, True, "\n".join(['<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'] * 3), "hello"),
        (MISTRAL, True, '[CALL]get_weather{"city":"x"}[CALL]stop{}', "[CALL]get_weather{}"),
        (MISTRAL, False, "[CALL]stop{}", "[CALL]stop{}[CALL]stop{}"),
    ],
)
def test_a_call_can_be_forced_in_the_syntax_of_the_model(takes, tokenizer, form, several, good, bad):
    [control] = tokenizer.encode("[CALL]")
    forced = calls_grammar(form, TOOLS, {"[CALL]": control}, several=several)
    assert forced.param == "tools"
    assert takes(forced, good)
    assert not takes(forced, bad)


@pytest.mark.slow
def test_tools_whose_schemas_are_too_long_cannot_be_forced():
    with pytest.raises(InvalidRequest, match="offer fewer tools") as refused:
        calls_grammar(HERMES, {"f": {"description": "x" * MAX_GRAMMAR}}, {}, several=False)
    assert refused.value.param == "tools"


def test_an_error_names_the_tool_and_does_not_quote_the_grammar(grammars):
    tools = {"fine": {"type": "object"}, "wrong": {"type": "object", "properties": {"a": {"type": "hiccup"}}}, "last": None}
    forced = calls_grammar(HERMES, tools, {}, several=True)
    with pytest.raises(InvalidRequest, match=r"^the parameters of wrong: Invalid type: hiccup$"):
        grammars.compile(forced).result(PATIENCE)
    with pytest.raises(InvalidRequest) as refused:
        grammars.compile(structure("grammar", 'start: "secret" foo\n')).result(PATIENCE)
    assert "foo" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_structures_with_many_triggers_are_refused_before_their_schemas_are_repeated():
    tags = [Tag("a" * (number + 1), Repeated({}), "") for number in range(100)]
    with pytest.raises(InvalidRequest, match="has more than 65536 characters of schemas"):
        tags_grammar(tags, [tag.begin for tag in tags], "response_format")
    assert max(tag.schema.reads for tag in tags) == 1


class Repeated(dict):
    """A schema that counts how often it is read."""

    reads = 0

    def get(self, *arguments):
        self.reads += 1
        return super().get(*arguments)


TAGS = [
    Tag("<f>", {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}, "</f>"),
    Tag("<fun>", {}, ";"),
]
TAGS += [Tag("[g]", {"type": "boolean"}, "")]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("no tags", True),
        ('So <f>{"a":1}</f> and <fun>7; or [g]true.', True),
        ('<f>{"b": 1}</f>', False),
        ("<fun>7", False),
        ("<for>", False),
        ("[g]7", False),
        ("[g", True),
    ],
)
def test_a_trigger_begins_a_structure(takes, text, good):
    assert takes(tags_grammar(TAGS, ["<f", "[g]"], "response_format"), text) == good
