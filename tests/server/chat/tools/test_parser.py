import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.server.chat.tools.formats import TOOL_PARSERS
from chairlift.server.chat.tools.json_text import JsonText
from chairlift.server.chat.tools.parser import ToolCallDelta

NAMES = ("f", "get_weather")


def parsed(syntax, pieces):
    """Content and calls of a text that comes in `pieces`, the calls as (id, name, arguments)."""
    numbers = itertools.count()
    parser = TOOL_PARSERS[syntax](NAMES, lambda: f"id{next(numbers)}")
    news = [one for piece in pieces for one in parser.push(piece)] + parser.end()
    calls = []
    for call in (one for one in news if isinstance(one, ToolCallDelta)):
        if call.name is not None:
            assert call.index == len(calls)
            calls.append([call.id, call.name, ""])
        assert call.index == len(calls) - 1
        calls[-1][2] += call.arguments
    return "".join(one for one in news if isinstance(one, str)), [tuple(call) for call in calls]


NESTED = '{"a": {"b": [1, -2.5e3, {"c": null}], "d": "}]{["}, "e": true}'
ESCAPED = r'{"city": "Z\u00fcrich \ud83d\ude00 \"[]\" \\"}'
MARKS = '{"text": "</tool_call> [TOOL_CALLS] <|python_tag|>"}'

TWO = f"""I look.
<tool_call>{{"name":"f","arguments":{NESTED}}}</tool_call>
<tool_call>
{{"arguments": {ESCAPED}, "name": "get_weather"}}</tool_call>
"""
SEMICOLON = '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"a": 1}}'
ARRAY = f'[{{"name": "f", "arguments": {NESTED}}}, {{"name": "get_weather", "arguments": {ESCAPED}, "id": "abcdefghi"}}]'
WITH_IDS = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{}'

PYTHON = '{"a": "x]\\"", "b": [-1, [2.5, null]], "c": {"d": true, "e": false}}'
DEEPSEEK = {"CALL_END": "call\u2581end", "CALL": "call\u2581begin", "BEGIN": "calls\u2581begin", "END": "calls\u2581end", "SEP": "sep"}


def deepseek(text):
    """A text with DeepSeek's marks for the words in capitals."""
    for name, mark in DEEPSEEK.items():
        text = text.replace(name, f"<\uff5ctool\u2581{mark}\uff5c>")
    return text


GOLDEN = [
    # Hermes
    ("hermes", "Hello.", "Hello.", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", [("f", "{}")]),
    ("hermes", TWO, "I look.", [("f", NESTED), ("get_weather", ESCAPED)]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {MARKS}}}</tool_call>', "", [("f", MARKS)]),
    ("hermes", 'So \n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone.', "So\nDone.", [("f", "{}")]),
    ("hermes", '<tool_call>[{"name": "f"}, {"name": "f", "arguments": {"a": 1}}]</tool_call>', "", [("f", "{}"), ("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null, "id": [7]}</tool_call>', "", [("f", "{}")]),
    # A raw line break in a string, a missing brace, one too many, and no end.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', "", [("f", '{"a": "1\\n2"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>x', "x", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call> x', " x", [("f", '{"a": 1, oops}}')]),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    # Llama
    ("llama", "Hello.", "Hello.", []),
    ("llama", f'{{"name": "f", "parameters": {NESTED}}}', "", [("f", NESTED)]),
    ("llama", f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {ESCAPED}}}', "", [("f", ESCAPED)]),
    ("llama", SEMICOLON, "", [("f", "{}"), ("get_weather", '{"a": 1}')]),
    ("llama", f'I look. <|python_tag|>{{"name": "f", "parameters": {MARKS}}}', "I look.", [("f", MARKS)]),
    ("llama", f"So: {SEMICOLON}", f"So: {SEMICOLON}", []),
    ("llama", '{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
    ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama", '{"name": "f", "parameters": {}} and so on', " and so on", [("f", "{}")]),
    # Mistral, older and newer
    ("mistral", "Hello [1].", "Hello [1].", []),
    ("mistral", f"[TOOL_CALLS] {ARRAY}", "", [("f", NESTED), ("get_weather", ESCAPED)]),
    ("mistral", f"I look.[TOOL_CALLS]f[ARGS]{MARKS}", "I look.", [("f", MARKS)]),
    ("mistral", WITH_IDS, "", [("f", '{"a": 1}'), ("get_weather", "{}")]),
    ("mistral", "[TOOL_CALLS]f{}", "", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f[ARGS]{'a'}[TOOL_CALLS]f[ARGS]{}", "", [("f", "{'a'}"), ("f", "{}")]),
    # Granite
    ("granite", f"<|tool_call|>{ARRAY}", "", [("f", NESTED), ("get_weather", ESCAPED)]),
    ("granite", f"I look. <tool_call> {ARRAY}", "I look.", [("f", NESTED), ("get_weather", ESCAPED)]),
    ("granite", f"<|tool_call|>{ARRAY}<|/tool_call|>x", "x", [("f", NESTED), ("get_weather", ESCAPED)]),
    ("granite", "Hello <|/tool_call|>.", "Hello <|/tool_call|>.", []),
    # DeepSeek: V3, V3.1, broken off, broken
    ("deepseek", "Hello.", "Hello.", []),
    ("deepseek", deepseek(f"BEGINCALLfunctionSEPf\n```json\n{NESTED}\n```CALL_ENDEND"), "", [("f", NESTED)]),
    (
        "deepseek",
        deepseek(
            f"I look.BEGINCALLfunctionSEPf\n```json\n{NESTED}\n```CALL_END\nCALLfunctionSEPget_weather\n```json\n{{}}\n```CALL_ENDEND"
        ),
        "I look.",
        [("f", NESTED), ("get_weather", "{}")],
    ),
    (
        "deepseek",
        deepseek(f"BEGINCALLfSEP{ESCAPED}CALL_ENDCALLget_weatherSEP{{}}CALL_ENDEND!"),
        "!",
        [("f", ESCAPED), ("get_weather", "{}")],
    ),
    ("deepseek", deepseek('BEGINCALLfSEP{"a": 1'), "", [("f", '{"a": 1')]),
    ("deepseek", deepseek('BEGINCALLfSEP{"a": oops}CALL_ENDEND'), "", [("f", '{"a": oops}')]),
    ("deepseek", deepseek("BEGINCALLunknownSEP{}CALL_ENDEND"), deepseek("BEGINCALLunknownSEP{}CALL_ENDEND"), []),
    # Gemma
    ("gemma", "Hello.", "Hello.", []),
    (
        "gemma",
        'Ok <|tool_call>call:f{city:<|"|>Bern, {CH}<|"|>,days:3,at:{x:[1.5,true,<|"|>"q"<|"|>],y:{}},z:null}<tool_call|>',
        "Ok",
        [("f", '{"city": "Bern, {CH}", "days": 3, "at": {"x": [1.5, true, "\\"q\\""], "y": {}}, "z": null}')],
    ),
    (
        "gemma",
        "<start_function_call>call:f{city:<escape>Tokyo<escape>}<end_function_call><start_function_call>call:get_weather{}<end_function_call>",
        "",
        [("f", '{"city": "Tokyo"}'), ("get_weather", "{}")],
    ),
    ("gemma", '<|tool_call>call:f{"a": "1\\u00fc", "b": word}<tool_call|>x', "x", [("f", '{"a": "1ü", "b": "word"}')]),
    ("gemma", '<|tool_call>call:f{a:<|"|>never', '<|tool_call>call:f{a:<|"|>never', []),
    ("gemma", "<|tool_call>call:f{a:1e999}<tool_call|>", "<|tool_call>call:f{a:1e999}<tool_call|>", []),
    ("gemma", "<|tool_call>call:f{a:NaN}<tool_call|>", "<|tool_call>call:f{a:NaN}<tool_call|>", []),
    # Python
    ("pythonic", "Hello [1].", "Hello [1].", []),
    ("pythonic", "[1] is a source.", "[1] is a source.", []),
    ("pythonic", "[f()", "[f()", []),
    (
        "pythonic",
        '[f(a="x]\\"", b=[-1, (2.5, None)], c={"d": True, "e": false}), get_weather()]',
        "",
        [("f", PYTHON), ("get_weather", "{}")],
    ),
    ("pythonic", f" \n[f(**{NESTED})]", "", [("f", json.dumps(json.loads(NESTED)))]),
    ("pythonic", "Ok <|tool_call_start|>[f(a='1')]<|tool_call_end|> x", "Ok x", [("f", '{"a": "1"}')]),
    ("pythonic", "<|python_start|>[f(a='1')]<|python_end|>", "", [("f", '{"a": "1"}')]),
    *(
        ("pythonic", text, text, [])
        for text in ("[f(1)]", "[f(a=open('x'))]", "[f(a=1), g()]", "[f(a=1e999)]", "[f(a=b'x')]", "[f(a='\\ud800')]")
    ),
    *(("pythonic", text, text, []) for text in ("[f(a=1) for f in x]", "[f(**{1: 2})]", "[f(**a)]", "[f(a=x)(b=1)]", "[f(a={1: 2})]")),
    # gpt-oss
    ("openai", "<|channel|>final<|message|>Hello.<|return|>", "Hello.", []),
    ("openai", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{NESTED}<|call|>", "", [("f", NESTED)]),
    (
        "openai",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{ESCAPED}",
        "I look.",
        [("f", ESCAPED)],
    ),
    ("openai", "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>", "{}", []),
    ("openai", "<|channel|>commentary to=functions.f<|message|>{oops}<|call|>", "", [("f", "{oops}")]),
    ("openai", "<|channel|>commentary to=functions.f", "", []),
    ("openai", "Hello.", "Hello.", []),
]


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), GOLDEN, ids=[f"{case[0]} {case[1]:.60}" for case in GOLDEN])
def test_content_and_calls_of_a_text(syntax, text, content, calls):
    expected = content, [(f"id{number}", *call) for number, call in enumerate(calls)]
    assert parsed(syntax, [text]) == expected
    assert parsed(syntax, text) == expected  # a character at a time
    for at in range(len(text)):
        assert parsed(syntax, [text[:at], "", text[at:]]) == expected


NO_CALLS = [
    *("{}", "[]", "[1]", "{7: 1}", "{'name': 'f'}", '{"name": "f"', '{"name": 7}', '{"name": ["f"]}', '{"arguments": {}}'),
    *('{"name": "unknown", "arguments": {}}', '{"name": "\\ud800"}', '{"name": "f", "name": "unknown"}', '{"name": "f", "x": 1}'),
    *('{"name": "f", "arguments": []}', '{"name": "f", "arguments": "{"}', '{"name": "f", "arguments": "[1]"}', '{"name": "f" "id": 1}'),
    '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
    *('{"id": "a\nb"}', "def f(): pass", "f", "f[ARGS]", "f[ARGS]7", "unknown[ARGS]{}"),
    *("{" * 5000, "[" * 5000, '{"id": ' + "[" * 5000, "f" * 1000),
]
MARKED = [
    *(("hermes", "<tool_call>", "</tool_call>"), ("llama", "<|python_tag|>", ""), ("mistral", "[TOOL_CALLS]", "")),
    *(("granite", "<|tool_call|>", ""), ("gemma", "<|tool_call>", "<tool_call|>"), ("pythonic", "<|tool_call_start|>", "")),
    *(("deepseek", deepseek("BEGIN"), deepseek("END")), ("openai", "x", "")),
]


@pytest.mark.parametrize("text", NO_CALLS, ids=lambda text: f"{text:.40}")
@pytest.mark.parametrize(("syntax", "begin", "end"), MARKED)
def test_what_is_no_call_is_content_as_it_was_written(syntax, begin, end, text):
    text = f"a {begin} {text}{end} b\n"
    assert parsed(syntax, [text]) == (text, [])


PIECES = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<tool", "</", "[TOOL", "<|"),
    *("<|tool_call|>", "<|tool_call>", "<tool_call|>", "call:f{", 'a:<|"|>', "<|tool_call_start|>", "[f(", "a=", ")", "'", "1)]"),
    *("<|channel|>", "<|message|>", "to=functions.f", "<|end|>", *map(deepseek, ("BEGIN", "CALL", "fSEP", "CALL_END", "END"))),
    *('{"name": "f", "arguments": {"a": [1, "x"]}}', '"parameters": ', '{"name": "f", ', '"arguments": ', '{"a": "\\u00e9\\""}', "f", "{}"),
    *("{", "}", "[", "]", ",", ";", ":", '"', "\\", " ", "\n", "\t", "é😀", "-1.5e", "tru", "null", "x"),
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(TOOL_PARSERS)), st.lists(st.sampled_from(PIECES), max_size=24), st.lists(st.integers(0, 200), max_size=12))
def test_how_a_text_is_cut_changes_nothing(syntax, pieces, cuts):
    text = "".join(pieces)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    content, calls = whole = parsed(syntax, [text])
    assert parsed(syntax, [text[start:end] for start, end in itertools.pairwise(places)]) == whole
    assert parsed(syntax, text) == whole
    if not calls and syntax != "openai":  # its content has marks
        assert content == text
    assert all(name in NAMES for _, name, _ in calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), st.sampled_from((None, 1)))
def test_arguments_come_through_whatever_they_are(arguments, ascii_only, indent):
    to_json_bytes = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    for syntax, text in (
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {to_json_bytes}}}</tool_call>'),
        ("llama", f'{{"name": "f", "parameters": {to_json_bytes}}}'),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{to_json_bytes}"),
    ):
        assert parsed(syntax, text) == ("", [("id0", "f", to_json_bytes)])


@pytest.mark.parametrize(
    ("syntax", "begin"),
    [("gemma", "<|tool_call>call:f{a:"), ("gemma", '<|tool_call>call:f{a:<|"|>'), ("pythonic", "[f(a="), ("pythonic", "[f(a='")],
)
@pytest.mark.parametrize("text", ["{" * 5000, "[" * 5000, "{a:" * 5000, "[" * 5000 + "]" * 5001, "(" * 3000 + ")" * 3001 + "]", "-" * 5000])
def test_arguments_that_are_nested_too_deeply_are_content(syntax, begin, text):
    assert parsed(syntax, [f"{begin}{text}"]) == (f"{begin}{text}", [])


def test_only_what_may_become_a_call_is_held_back():
    parser = TOOL_PARSERS["hermes"](NAMES)
    assert parser.push("a < b <t") == ["a < b"]
    assert parser.push("able") == [" ", "<table"]
    assert parser.push("d \n") == ["d"]
    assert parser.end() == [" \n"]


SLIPS = ("", "0", "-", ".", "e", "[", "]", "}", '"', ",", ":", "\\", "x", " ")


@settings(max_examples=60, deadline=None)
@given(JSON.map(json.dumps), st.integers(0, 99), st.sampled_from(SLIPS), st.integers(0, 2))
def test_json_is_json_and_nothing_else(text, at, slip, cut):
    at %= len(text) + 1
    text = f"[{text[:at]}{slip}{text[at + cut :]}]"
    value = JsonText()
    read = "".join(value.read(character, 0)[0] for character in text)
    try:
        json.loads(text)
    except json.JSONDecodeError:
        assert not value.done or len(read) < len(text)
    else:
        assert value.done
        assert read == text


def test_a_call_is_told_as_it_comes():
    parser = TOOL_PARSERS["hermes"](NAMES, lambda: "id")
    assert parser.push('<tool_call>{"name": "f", "arguments"') == []
    assert parser.push(': {"a') == [ToolCallDelta(0, id="id", name="f"), ToolCallDelta(0, '{"a')]
    assert parser.push('": 1') == [ToolCallDelta(0, '": 1')]
    assert parser.push("}}</tool") == [ToolCallDelta(0, "}")]
    assert parser.push("_call>") == parser.end() == []


def test_mistral_s_ids_are_what_its_templates_take():
    ids = {TOOL_PARSERS["mistral"].new_id() for _ in range(20)}
    assert len(ids) == 20
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in ids)
