import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.chat.tools.argument_types import argument_types
from chairlift.chat.tools.formats import TOOL_PARSERS
from chairlift.chat.tools.json_text import JsonText
from chairlift.chat.tools.parser import ToolCallDelta

NAMES = ("f", "get_weather", "get-it")
COLOUR = {"enum": ["red", "7"]}
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "hot": {"type": "boolean"},
    "ratio": {"type": "number"},
    "many": {"type": "array"},
    "at": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "string"]},
    "colour": {"$ref": "#/$defs/Colour"},
    "loop": {"$ref": "#/properties/loop"},
    "any": {},
}
TYPES = {"f": argument_types({"type": "object", "properties": PROPERTIES, "$defs": {"Colour": COLOUR}})}


def parsed(syntax, pieces):
    """Content and calls of a text that comes in `pieces`, the calls as (id, name, arguments)."""
    numbers = itertools.count()
    parser = TOOL_PARSERS[syntax](NAMES, lambda: f"id{next(numbers)}", TYPES)
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

COHERE = f"""{{"tool_call_id": "0", "tool_name": "f", "parameters": {NESTED}}},
    {{"tool_call_id": "1", "tool_name": "get_weather", "parameters": {{}}}}"""

PYTHON = '{"a": "x]\\"", "b": [-1, [2.5, null]], "c": {"d": true, "e": false}}'
DEEPSEEK = {"CALL_END": "call\u2581end", "CALL": "call\u2581begin", "BEGIN": "calls\u2581begin", "END": "calls\u2581end", "SEP": "sep"}


def deepseek(text):
    """A text with DeepSeek's marks for the words in capitals."""
    for name, mark in DEEPSEEK.items():
        text = text.replace(name, f"<\uff5ctool\u2581{mark}\uff5c>")
    return text


def dsml(name, *arguments):
    """A call of DeepSeek V3.2; each argument has its name, whether it is marked as text, and its value."""
    written = "".join(
        f'<\uff5cDSML\uff5cparameter name="{key}" string="{json.dumps(is_text)}">{value}</\uff5cDSML\uff5cparameter>\n'
        for key, is_text, value in arguments
    )
    invoke = f'<\uff5cDSML\uff5cinvoke name="{name}">\n{written}</\uff5cDSML\uff5cinvoke>'
    return f"<\uff5cDSML\uff5cfunction_calls>\n{invoke}\n</\uff5cDSML\uff5cfunction_calls>"


def qwen(name, **arguments):
    """A call as Qwen's template writes it, after some text."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"I look.\n\n<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


CODE = r"""{"city": "\n if a < b:\n\t\"é\"\n</function>\n</par>\n"}"""

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
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
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
    ("llama", ARRAY.replace("arguments", "parameters"), "", [("f", NESTED), ("get_weather", ESCAPED)]),
    ("llama", "[1] is a source.", "[1] is a source.", []),
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
    ("deepseek", deepseek("CALLfSEP{}CALL_END\nCALLget_weatherSEP{}CALL_ENDEND!"), "!", [("f", "{}"), ("get_weather", "{}")]),
    ("deepseek", deepseek("BEGINCALLunknownSEP{}CALL_END"), deepseek("BEGINCALLunknownSEP{}CALL_END"), []),
    # DeepSeek V3.2 and V4: the attribute tells text from JSON; broken off, broken, and JSON
    ("deepseek_v32", "Hello <b>.", "Hello <b>.", []),
    (
        "deepseek_v32",
        "I look.\n\n" + dsml("f", ("days", True, "3"), ("city", False, "7"), ("at", False, '{"x": [1]}'), ("any", True, " a < b ")),
        "I look.",
        [("f", '{"days": "3", "city": "7", "at": {"x": [1]}, "any": " a < b "}')],
    ),
    ("deepseek_v32", dsml("f", ("days", False, "x")) + "!", "!", [("f", '{"days": "x"}')]),
    ("deepseek_v32", dsml("f", ("city", True, "Bern")).partition("rn<")[0], "", [("f", '{"city": "Be')]),
    ("deepseek_v32", dsml("unknown"), dsml("unknown"), []),
    (
        "deepseek_v32",
        dsml("f", ("city", True, "x")).replace("true", "yes"),
        'city" string="yes">x</\uff5cDSML\uff5cparameter>\n</\uff5cDSML\uff5cinvoke>',
        [("f", "{}")],
    ),
    ("deepseek_v32", '<\uff5cDSML\uff5cfunction_calls>\n{"name": "f"}\n</\uff5cDSML\uff5cfunction_calls>', "", [("f", "{}")]),
    (
        "deepseek_v4",
        (dsml("f") + dsml("f", ("city", True, "Bern"))).replace("function_", "tool_"),
        "",
        [("f", "{}"), ("f", '{"city": "Bern"}')],
    ),
    # Command R: as its template writes it, without the block, broken, and other code
    (
        "command_r",
        f"I look.\nAction:\n```json\n[\n    {COHERE}\n]```\nOk ```py``` {{}}",
        "I look.\nOk ```py``` {}",
        [("f", NESTED), ("get_weather", "{}")],
    ),
    ("command_r", 'Action: [{"tool_name": "f"}] ```x```', 'Action: [{"tool_name": "f"}] ```x```', []),
    ("command_r", 'Action: ```json\n[{"tool_name": "f", "parameters": {oops}}]\n```!', "!", [("f", "{oops}}]\n")]),
    *(
        ("command_r", text, text, [])
        for text in ("Plan of Action: none. ```x```", "Action: ```py", 'Action: ```json\n[{"tool_name": "g"}]```')
    ),
    # Apertus: broken off, broken, and no calls
    (
        "apertus",
        f'I look.<|tools_prefix|>[{{"f": {NESTED}}}, {{"get-it": {{}}}}]<|tools_suffix|>!',
        "I look.!",
        [("f", NESTED), ("get-it", "{}")],
    ),
    ("apertus", '<|tools_prefix|>[{"f": {"a": 1', "", [("f", '{"a": 1')]),
    ("apertus", '<|tools_prefix|>[{"f": {"a": oops}}]<|tools_suffix|>', "", [("f", '{"a": oops}}]')]),
    *(("apertus", text, text, []) for text in ('<|tools_prefix|>[{"f": 1}]', '<|tools_prefix|>[{"g": {}}]<|tools_suffix|>')),
    # InternLM2
    (
        "internlm",
        f'I look.<|action_start|> <|plugin|>\n{{"name": "f", "parameters": {NESTED}}}\n<|action_end|>!',
        "I look.!",
        [("f", NESTED)],
    ),
    ("internlm", "<|action_start|><|interpreter|>\n1 + 1<|action_end|>", "<|action_start|><|interpreter|>\n1 + 1<|action_end|>", []),
    # Functionary 3.1 and 3.2
    ("functionary_v3.1", f"I look. <function=f>{NESTED}</function>!", "I look.!", [("f", NESTED)]),
    ("functionary_v3.1", '<function=get-it>{"a": oops}</function>', "", [("get-it", '{"a": oops}')]),
    *(("functionary_v3.1", text, text, []) for text in ("<function=f>()</function>", "<function=g>{}</function>", "<function=f")),
    ("functionary_v3.2", "all\nHello.\n>>> 1 + 1", "Hello.\n>>> 1 + 1", []),
    ("functionary_v3.2", f"all\nI look.\n>>>f\n{NESTED}>>>get_weather\n{{}}", "I look.", [("f", NESTED), ("get_weather", "{}")]),
    ("functionary_v3.2", 'f\n{"a": oops}>>>all\nok', "ok", [("f", '{"a": oops}')]),
    *(("functionary_v3.2", text, text, []) for text in ("all", "alligators\n", "g\n{}", "f\n", "f {}")),
    # GLM-4-0414
    ("glm4_0414", "\nHello.\n", "\nHello.\n", []),
    ("glm4_0414", f"\nf\n{NESTED}\n<|assistant|>get_weather\n{{}}\n", "", [("f", NESTED), ("get_weather", "{}")]),
    ("glm4_0414", 'f\n{"a": 1', "", [("f", '{"a": 1')]),
    *(("glm4_0414", text, text, []) for text in ("f\nis a name", "I call f\n{}", "g\n{}", "f", "get_weather-or-not\n{}")),
    # Cohere, and Hunyuan with a list or lines
    ("cohere", f"I look.<|START_ACTION|>[\n    {COHERE}\n]<|END_ACTION|>!", "I look.!", [("f", NESTED), ("get_weather", "{}")]),
    ("hunyuan", f"I look.\n<tool_calls>{ARRAY}</tool_calls>", "I look.", [("f", NESTED), ("get_weather", ESCAPED)]),
    ("hunyuan", '<tool_calls>\n{"name": "f"}\n{"name": "f", "arguments": {"a": 1}}\n</tool_calls>', "", [("f", "{}"), ("f", '{"a": 1}')]),
    # Gemma
    ("gemma", "Hello.", "Hello.", []),
    (
        "gemma",
        'Ok <|tool_call>call:f{city:<|"|>Bern, {CH}<|"|>,days:3,at:{x:[1.5,true,<|"|>"q"<|"|>],y:{}},z:None,t:True}<tool_call|>',
        "Ok",
        [("f", '{"city": "Bern, {CH}", "days": 3, "at": {"x": [1.5, true, "\\"q\\""], "y": {}}, "z": null, "t": true}')],
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
    # Nemotron
    ("nemotron", f"I look.\n<TOOLCALL>{ARRAY}</TOOLCALL>", "I look.", [("f", NESTED), ("get_weather", ESCAPED)]),
    ("nemotron", '<TOOLCALL>[{"name": "f", "parameters": {}}]</TOOLCALL> ok', " ok", [("f", "{}")]),
    ("nemotron", "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
    # Qwen3-Coder and Qwen3.5: as the template writes it, text with tags in it, without arguments, and without the outer tags
    ("qwen3_coder", "Hello <b>.", "Hello <b>.", []),
    (
        "qwen3_coder",
        qwen("f", city="Bern", days="3", hot="true", ratio="-1.5", many='[1, "x"]', at='{"x": null}', maybe="null", either="7", any="7"),
        "I look.",
        [
            (
                "f",
                '{"city": "Bern", "days": 3, "hot": true, "ratio": -1.5, "many": [1, "x"], "at": {"x": null}, "maybe": null, "either": 7, '
                '"any": 7}',
            )
        ],
    ),
    (
        "qwen3_coder",
        qwen("f", city="7", hot="False", days="None", many="x, y", maybe="7", either="7.5", colour="7", any="a <b>", loop="1"),
        "I look.",
        [
            (
                "f",
                '{"city": "7", "hot": false, "days": null, "many": "x, y", "maybe": "7", "either": "7.5", "colour": "7", "any": "a <b>", '
                '"loop": 1}',
            )
        ],
    ),
    ("qwen3_coder", qwen("f", city='\n if a < b:\n\t"é"\n</function>\n</par>\n'), "I look.", [("f", CODE)]),
    ("qwen3_coder", qwen("f", city=""), "I look.", [("f", '{"city": ""}')]),
    ("qwen3_coder", qwen("f") + qwen("get_weather", new="x"), "I look.I look.", [("f", "{}"), ("get_weather", '{"new": "x"}')]),
    ("qwen3_coder", "<function=f><parameter=city>Bern</parameter></function>ok", "ok", [("f", '{"city": "Bern"}')]),
    ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ("qwen3_coder", "<tool_call><function=f></tool_call>x", "x", [("f", "{}")]),
    # A value's end forgotten, and what only looks like it.
    (
        "qwen3_coder",
        f"{qwen('f', city='Bern', days='3')}{qwen('f', city='Bern')}".replace("\n</parameter>", "").replace("l>I look.", "l>"),
        "I look.",
        [("f", '{"city": "Bern", "days": 3}'), ("f", '{"city": "Bern"}')],
    ),
    (
        "qwen3_coder",
        qwen("f", city="a\n<parameter=x>\n</tool_call>\n</function>\n</tool_call> b\n</function>", any="1\n</function>"),
        "I look.",
        [("f", r"""{"city": "a\n<parameter=x>\n</tool_call>\n</function>\n</tool_call> b\n</function>", "any": "1\n</function>"}""")],
    ),
    # Broken off, and broken.
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=city>\nBe", "", [("f", '{"city": "Be')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=days>\n12", "", [("f", '{"days": ')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=days>\n12\n</parameter>\n</fun", "", [("f", '{"days": 12')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=da", "", [("f", "{")]),
    ("qwen3_coder", "<function=f><parameter=days>1</parameter> and <b>", " and <b>", [("f", '{"days": 1}')]),
    ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>", "<tool_call>\n<function=unknown>\n</function>", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\nno", "<tool_call>\n<function=f>\nno", []),
    ("qwen3_coder", qwen("f", days="1e999", ratio="NaN"), "I look.", [("f", '{"days": "1e999", "ratio": "NaN"}')]),
    # Python's literals where no text is allowed; one that JSON cannot have is text.
    (
        "qwen3_coder",
        qwen("f", at="{'a': (True, '7')}", maybe="['a']"),
        "I look.",
        [("f", """{"at": {"a": [true, "7"]}, "maybe": "['a']"}""")],
    ),
    ("qwen3_coder", qwen("f", many=r"['\ud800']", at="{1, 2}"), "I look.", [("f", r"""{"many": "['\\ud800']", "at": "{1, 2}"}""")]),
    # GLM 4.5 and 4.7
    ("glm", "Hello <b>.", "Hello <b>.", []),
    (
        "glm",
        "I look.\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Bern\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>get_weather\n</tool_call>",
        "I look.",
        [("f", '{"city": "Bern\\n", "days": 3}'), ("get_weather", "{}")],
    ),
    (
        "glm",
        "<tool_call>f<arg_key>at</arg_key><arg_value>{}</arg_value><arg_key>any</arg_key><arg_value>x</arg_value></tool_call>"
        "<tool_call>get_weather</tool_call>",
        "",
        [("f", '{"at": {}, "any": "x"}'), ("get_weather", "{}")],
    ),
    ("glm", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
    ("glm", "<tool_call>f<arg_key>city</arg_key><arg_value>Be", "", [("f", '{"city": "Be')]),
    ("glm", "<tool_call>f<arg_key>city</arg_key>Bern</tool_call>", "city</arg_key>Bern", [("f", "{}")]),
    ("glm", "<tool_call>unknown</tool_call>", "<tool_call>unknown</tool_call>", []),
    # Seed-OSS, whose values keep their line breaks, and MiniMax
    (
        "seed_oss",
        "I look.\n<seed:tool_call>\n<function=f>\n<parameter=city>\nBern\n</parameter>\n<parameter=many>['a', None]</parameter>\n"
        "</function>\n</seed:tool_call>",
        "I look.",
        [("f", '{"city": "\\nBern\\n", "many": ["a", null]}')],
    ),
    ("seed_oss", '<seed:tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</seed:tool_call>', "", [("f", '{"a": 1}')]),
    (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">7 < 8</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="get_weather">\n</invoke>\n</minimax:tool_call>',
        "I look.",
        [("f", '{"city": "7 < 8", "days": 3}'), ("get_weather", "{}")],
    ),
    # OLMo 3
    ("olmo3", "Hello.", "Hello.", []),
    (
        "olmo3",
        'I look.<function_calls>f(a="</function_calls>\n", b=[true, null])\nget_weather()\n</function_calls> x',
        "I look. x",
        [("f", '{"a": "</function_calls>\\n", "b": [true, null]}'), ("get_weather", "{}")],
    ),
    ("olmo3", "<function_calls>f(a='1')", "", [("f", '{"a": "1"}')]),
    ("olmo3", "<function_calls>f(a='1", "<function_calls>f(a='1", []),
    # Python
    ("pythonic", "[f(a='1\n2\r')]", "", [("f", '{"a": "1\\n2\\r"}')]),
    ("pythonic", "[f(a='\\\n')]", "", [("f", '{"a": ""}')]),
    ("pythonic", "Hello [1].", "Hello [1].", []),
    ("pythonic", "[1] is a source.", "[1] is a source.", []),
    ("pythonic", "[f()", "[f()", []),
    ("pythonic", "[get-it(a='-')]", "", [("get-it", '{"a": "-"}')]),
    (
        "pythonic",
        '[f(a="x]\\"", b=[-1, (2.5, None)], c={"d": True, "e": false}), get_weather()]',
        "",
        [("f", PYTHON), ("get_weather", "{}")],
    ),
    ("pythonic", f" \n[f(**{NESTED})]", "", [("f", json.dumps(json.loads(NESTED)))]),
    ("pythonic", "Ok <|tool_call_start|>[f(a='1')]<|tool_call_end|> x", "Ok x", [("f", '{"a": "1"}')]),
    ("pythonic", f"<|tool_call_start|>{ARRAY}<|tool_call_end|>ok", "ok", [("f", NESTED), ("get_weather", ESCAPED)]),
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
    (
        "openai",
        f" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{NESTED}<|end|><|start|>assistant<|channel|>final<|message|>ok",
        "ok",
        [("f", NESTED)],
    ),
    ("openai", " to=functions.f<|channel|>comm", "", []),
    ("openai", " to=morrow", " to=morrow", []),
    ("openai", "<|channel|>commentary to=functions.f json<|message|> ", "", [("f", "{}")]),
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
    *(("deepseek", deepseek("BEGIN"), deepseek("END")), ("openai", "x", ""), ("nemotron", "<TOOLCALL>", "</TOOLCALL>")),
    *(("cohere", "<|START_ACTION|>", "<|END_ACTION|>"), ("hunyuan", "<tool_calls>", ""), ("kimi_k2", "<|tool_calls_section_begin|>", "")),
    *(("olmo3", "<function_calls>", "</function_calls>"), ("minimax_m2", "<minimax:tool_call>", ""), ("seed_oss", "<seed:tool_call>", "")),
    *(("command_r", "Action:", "```"), ("apertus", "<|tools_prefix|>", "<|tools_suffix|>"), ("internlm", "<|action_start|><|plugin|>", "")),
    *(("functionary_v3.1", "<function=", ""), ("functionary_v3.2", ">>>", ""), ("glm4_0414", "<|assistant|>", "")),
    *(("deepseek_v32", "<\uff5cDSML\uff5cfunction_calls>", ""), ("deepseek", deepseek("CALL"), "")),
    *(("qwen3_coder", "<tool_call>", "</tool_call>"), ("qwen3_coder", "<function=", ""), ("glm", "<tool_call>", " x</tool_call>")),
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
    *("<function=f>", "<function=", "<parameter=city>", "<parameter=days>\n", "\n</parameter>", "</function>", "<TOOLCALL>", "</TOOLCALL>"),
    *("<|START_ACTION|>[", '{"tool_name": "f"}', "<tool_calls>", "</tool_calls>", "<seed:tool_call>", "<minimax:tool_call>"),
    *('<invoke name="', "<function_calls>", "f()", "to=functions.", "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", 'f">', '<parameter name="city">', "</invoke>"),
    *("f\n", "<arg_key>", "days</arg_key>", "city</arg_key>", "<arg_value>", "</arg_value>", "<arg_"),
    *("Action:", "```", "```json\n", "<|tools_prefix|>[", '{"f": ', "<|tools_suffix|>", "<|action_start|>", "<|plugin|>", "<|action_end|>"),
    *("f>", ">>>", "<|assistant|>", "<\uff5cDSML\uff5cfunction_calls>", '<\uff5cDSML\uff5cinvoke name="', "</\uff5cDSML\uff5cinvoke>"),
    *('<\uff5cDSML\uff5cparameter name="', 'city" string="true">', 'days" string="false">', "</\uff5cDSML\uff5cparameter>"),
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


@pytest.mark.parametrize(("syntax", "template"), [("deepseek", ""), ("deepseek", "```json"), ("kimi_k2", "")])
def test_a_stop_string_within_the_marks_after_a_call_leaves_the_call_alone(syntax, template):
    form = TOOL_PARSERS[syntax].call_format(template)
    text = f'{form.begin}{form.before}f{form.between}{{"a": 1}}{form.after}{form.end}'
    for start in range(text.index("}") + 1, len(text)):
        stop = text[start : start + 8]
        if text.index(stop) != start:
            continue
        for pieces in ([text[:start]], text[:start]):
            parser = TOOL_PARSERS[syntax](NAMES, lambda: "id")
            news = [one for piece in pieces for one in parser.push(piece)] + parser.end(stop)
            assert "".join(one.arguments if isinstance(one, ToolCallDelta) else one for one in news) == '{"a": 1}', stop


@pytest.mark.parametrize("syntax", ["deepseek", "kimi_k2"])
def test_an_answer_that_breaks_off_within_the_marks_after_a_call_has_the_call(syntax):
    form = TOOL_PARSERS[syntax].call_format("")
    text = f'{form.begin}{form.before}f{form.between}{{"a": 1}}{form.after}{form.end}'
    for end in range(text.index("}") + 1, len(text)):
        parser = TOOL_PARSERS[syntax](NAMES, lambda: "id")
        news = parser.push(text[:end]) + parser.end()
        assert "".join(one.arguments for one in news if isinstance(one, ToolCallDelta)) == '{"a": 1}', end
        rest = "".join(one for one in news if isinstance(one, str))
        assert rest == "" or form.after.startswith(rest) or form.end.startswith(rest), rest


def test_a_mark_after_one_without_a_call_begins_a_call():
    parser = TOOL_PARSERS["internlm"](NAMES, lambda: "id")
    form = TOOL_PARSERS["internlm"].call_format("")
    news = parser.push(f'<|action_start|>{form.begin}{form.before}f{form.between}{{"a": 1}}{form.after}{form.end}') + parser.end()
    assert news[0] == "<|action_start|>"
    assert "".join(one.arguments for one in news if isinstance(one, ToolCallDelta)) == '{"a": 1}'


def test_mistral_s_ids_are_what_its_templates_take():
    ids = {TOOL_PARSERS["mistral"].new_id() for _ in range(20)}
    assert len(ids) == 20
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in ids)


def test_kimi_s_ids_are_what_the_model_wrote_and_unique():
    begin, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    ids = ("functions.f:3", "functions.f:3", "get_weather:4")
    calls = "".join(f'{begin}{one}<|tool_call_argument_begin|>{{"a": "{end}"}}{end}' for one in ids)
    content, parsed_calls = parsed("kimi_k2", f"I look.<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>ok")
    arguments = f'{{"a": "{end}"}}'
    assert content == "I look.ok"
    assert parsed_calls == [("functions.f:3", "f", arguments), ("id1", "f", arguments), ("get_weather:4", "get_weather", arguments)]
    form = TOOL_PARSERS["kimi_k2"].call_format("")
    one = f"{form.before}f{form.between}{{}}{form.after}"
    forced = f"{form.begin}{one}{form.separator}{one}{form.end}"
    assert parsed("kimi_k2", forced) == ("", [("functions.f:0", "f", "{}"), ("id1", "f", "{}")])


def test_glm_4_s_template_gets_calls_and_results_as_it_takes_them():
    calls = [{"id": "a", "function": {"name": name, "arguments": arguments}} for name, arguments in (("f", {"city": "Zürich"}), ("g", "7"))]
    user = {"role": "user", "content": "?"}
    messages = [user, {"role": "assistant", "content": "I look.", "tool_calls": calls}, {"role": "tool", "content": "rain"}]
    first, second = ({"role": "assistant", "metadata": name, "content": text} for name, text in (("f", '{"city": "Zürich"}'), ("g", "7")))
    result = {"role": "observation", "content": "rain"}
    history = TOOL_PARSERS["glm4_0414"].history
    assert history(messages) == [user, {"role": "assistant", "content": "I look."}, first, second, result]
    assert history([messages[1] | {"content": ""}]) == [first, second]
    assert TOOL_PARSERS["glm"].history(messages) is messages


@pytest.mark.parametrize(
    ("syntax", "template", "begin"),
    [
        ("pythonic", "List of tools: ", "<|tool_call_start|>["),
        ("nemotron", "<TOOLCALL>", "<TOOLCALL>["),
        ("glm", "<arg_key>", "<tool_call>\n"),
        ("cohere", "<|START_ACTION|>", "<|START_ACTION|>["),
        ("hunyuan", "<tool_calls>", "<tool_calls>["),
        ("minimax_m2", "<minimax:tool_call>", "<minimax:tool_call>\n"),
        ("olmo3", "<function_calls>", "<function_calls>"),
        ("seed_oss", "<seed:tool_call>", "<seed:tool_call>\n"),
    ],
)
def test_a_forced_call_is_one_that_the_parser_reads(syntax, template, begin):
    form = TOOL_PARSERS[syntax].call_format(template)
    assert form.begin == begin
    one = f'{form.before}f{form.between}{{"a": 1}}{form.after}'
    assert parsed(syntax, f"{form.begin}{one}{form.separator}{one}{form.end}") == ("", [("id0", "f", '{"a": 1}'), ("id1", "f", '{"a": 1}')])


def test_text_between_tags_is_told_as_it_comes():
    parser = TOOL_PARSERS["qwen3_coder"](NAMES, lambda: "id", TYPES)
    assert parser.push("<tool_call>\n<function=f>\n<parameter=") == [ToolCallDelta(0, id="id", name="f"), ToolCallDelta(0, "{")]
    assert parser.push("city>\nBe") == [ToolCallDelta(0, piece) for piece in ('"city": ', '"', "Be")]
    assert parser.push('r"n\n') == [ToolCallDelta(0, 'r\\"n')]
    assert parser.push("</parameter>\n</function>\n") == [ToolCallDelta(0, piece) for piece in ('"', "}")]
    assert parser.push("</tool_call>") == parser.end() == []
