import pytest

from chairlift.chat.tools.formats import TOOL_PARSERS, parser_for_template
from chairlift.chat.tools.parser import ToolCallDelta
from chairlift.server.config import ServerConfig


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{{ '<tool_call>\\n<function=' + call.name + '>' }}{{ '<parameter=' + key + '>\\n' }}", "qwen3_coder"),
        ("<tool_call>{{ call.name }}<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value></tool_call>", "glm"),
        ("Return calls within <tool_call></tool_call>: {{ '<tool_calls>[' + call + ']</tool_calls>' }}", "hunyuan"),
        ("<|START_ACTION|>[{{ call }}]<|END_ACTION|>", "cohere"),
        ("{{ '<|tool_calls_section_begin|>' }}<|tool_call_begin|>{{ call.id }}", "kimi_k2"),
        ("<minimax:tool_call>\n<invoke name=", "minimax_m2"),
        ("<seed:tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", "seed_oss"),
        ("You should use the `directly-answer` tool {{ '\\nAction:\\n```json\\n[\\n' }}", "command_r"),
        ("{%- set tool_calls_token = '<|tools_prefix|>' -%}<|inner_prefix|>", "apertus"),
        ("<|action_start|><|plugin|>", "internlm"),
        ('{%- set dsml_token = "\uff5cDSML\uff5c" -%}<{{ dsml_token }}function_calls>{{ message.tool_calls|length }}>', "deepseek_v32"),
        ('{%- set dsml_token = "\uff5cDSML\uff5c" -%}<{{ dsml_token }}tool_calls>', "deepseek_v4"),
        ("<\uff5cDSML\uff5ctool_calls>\n<\uff5cDSML\uff5cinvoke", "deepseek_v4"),
        ("<|python_tag|> ipython <{start_tag}={function_name}>{parameters}{end_tag}", "functionary_v3.1"),
        ("Respond in this format:\\n>>>${recipient}\\n${content}", "functionary_v3.2"),
        ("{%- elif role == 'assistant' and meta %}\n<|assistant|>{{ meta }}\n{{ content }}", "glm4_0414"),
        ("Output any function calls within <function_calls></function_calls> XML tags.", "olmo3"),
        ("{{ 'List of tools: <|tool_list_start|>[' }}", "pythonic"),
        ("{{ 'List of tools: [' }}{{ tools | tojson }}", "pythonic"),
        ("List of tools: {{ tools }}<tool_call>{{ call | tojson }}</tool_call>", "hermes"),
        ("List of tools: {{ tools }}<tool_call>\n<function=f>\n<parameter=city>", "qwen3_coder"),
        ("List of tools: {{ tools }}<tool_call>f<arg_key>city</arg_key>", "glm"),
        ("List of tools: {{ tools }}<TOOLCALL>[]</TOOLCALL>", "nemotron"),
        ("List of tools: {{ tools }}<|python_tag|>", "llama"),
        ("<AVAILABLE_TOOLS>{{ tools }}</AVAILABLE_TOOLS> reply with <TOOLCALL>[...]</TOOLCALL>", "nemotron"),
        ("<tool_call>{{ call | tojson }}</tool_call>", "hermes"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_template_tells_the_syntax(template, syntax):
    assert parser_for_template(template) is TOOL_PARSERS[syntax]


def test_the_flag_chooses_among_all_parsers():
    """The settings name them, because a command imports its settings before what parses answers."""
    flag = ServerConfig.__dataclass_fields__["tool_call_parser"].metadata
    assert {"auto", *flag["spellings"].values(), *TOOL_PARSERS} == set(flag["choices"])


@pytest.mark.parametrize(
    ("syntax", "template", "name"),
    [
        ("pythonic", "", "a:b/c.d-1"),
        ("olmo3", "", "a:b/c.d-1"),
        ("deepseek", "```json", "function"),
        ("deepseek", "", "function"),
        ("glm4_0414", "", "a:b/c.d-1"),
        ("functionary_v3.1", "", "a:b/c.d-1"),
    ],
)
def test_a_forced_call_may_have_any_name_that_a_function_may_have(syntax, template, name):
    form = TOOL_PARSERS[syntax].call_format(template)
    parser = TOOL_PARSERS[syntax]([name, "other"], lambda: "id")
    text = f"{form.begin}{form.before}{name}{form.between}{{}}{form.after}{form.end}"
    assert [*parser.push(text), *parser.end()] == [ToolCallDelta(0, id="id", name=name), ToolCallDelta(0, "{}")]
