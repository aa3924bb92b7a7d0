import json
from types import SimpleNamespace

import openai
import pytest
from events import events
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter
from server_here import MODEL

from chairlift.chat.functions import Function, ToolSpec
from chairlift.chat.model import ChatModel
from chairlift.chat_template import ChatTemplate
from chairlift.grammar.source import schemas_by_tool

pytestmark = pytest.mark.shared_server

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "get_time", "description": "the time"}}
ZURICH, OSLO = r'{"city": "Z\u00fcrich"}', '{"city": "Oslo"}'

CALL_1, CALL_2 = (f'{{"name": "get_weather", "arguments": {arguments}}}' for arguments in (ZURICH, OSLO))
LLAMA_1, LLAMA_2 = (call.replace("arguments", "parameters") for call in (CALL_1, CALL_2))
SAID = {
    "hermes": f"I look.\n<tool_call>{CALL_1}</tool_call>\n<tool_call>\n{CALL_2}\n</tool_call>",
    "llama": f"I look.<|python_tag|>{LLAMA_1}; {LLAMA_2}",
    "mistral": f"I look.[TOOL_CALLS][{CALL_1}, {CALL_2}]",
}
SIGNS = {"hermes": "<tool_call>", "llama": "ipython", "mistral": "[TOOL_CALLS]"}
"""What the models' chat templates have in them."""


def body(text, **fields):
    """A request that the scripted engine answers with `text`."""
    return {"model": MODEL, "messages": [{"role": "user", "content": f"SAY:{text}"}], "tools": [WEATHER, TIME], **fields}


@pytest.fixture(params=SAID)
def said(request, engine):
    """Two calls in one of the syntaxes, from a model that has this one."""
    engine.tokenizer.template = ChatTemplate({"default": "{{ tools }}" + SIGNS[request.param]}, {})
    return SAID[request.param]


def test_a_whole_answer_has_content_and_calls(http, said):
    answered = TypeAdapter(ChatCompletion).validate_python(http.post("/v1/chat/completions", json=body(said)).json(), strict=True)
    [choice] = answered.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("get_weather", ZURICH),
        ("get_weather", OSLO),
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_stream_is_put_together_by_the_client(client, said):
    with client.chat.completions.stream(**body(said, tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": True}}])) as stream:
        kinds = [event.type for event in stream]
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert [call.function.arguments for call in choice.message.tool_calls] == [ZURICH, OSLO]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 4


def test_only_the_first_piece_of_a_call_says_whose_it_is(client, said):
    stream = client.chat.completions.create(**body(said, stream=True))
    chunks = [TypeAdapter(ChatCompletionChunk).validate_python(chunk.model_dump(exclude_unset=True), strict=True) for chunk in stream]
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0, 1}
    for index in (0, 1):
        first, *others = [piece for piece in pieces if piece.index == index]
        assert (first.type, first.function.name) == ("function", "get_weather")
        assert first.id
        assert len(others) > 2
        assert {(piece.id, piece.type, piece.function.name) for piece in others} == {(None, None, None)}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look."


def test_mistral_s_clients_get_whole_calls(http, said):
    response = http.post("/v1/chat/completions", json=body(said, stream=True), headers={"user-agent": "mistral-client-python/1.9.11"})
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response) if chunk]
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert functions == [{"name": "get_weather", "arguments": arguments} for arguments in (ZURICH, OSLO)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert all(deltas[:-1])


def test_without_content_it_is_null(client):
    request = body('<tool_call>{"name": "get_time"}</tool_call>')
    assert [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**request, stream=True)] == [None] * 3
    message = client.chat.completions.create(**request).choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "get_time", oops}</tool_call>', '<tool_call>{"name": "rm_rf"}</tool_call>', "<tool_", "No."]
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_told_as_it_is(client, text, stream):
    if stream:
        chunks = list(client.chat.completions.create(**body(text, stream=True)))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert all(chunk.choices[0].delta.tool_calls is None for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        [choice] = client.chat.completions.create(**body(text)).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_the_beginning_of_a_forced_call_is_no_content(client):
    text = f"<tool_call>{CALL_1}</tool_call>\n<tool_call>{CALL_2}"
    tokens = (text.index("get_weather", len(CALL_1) + 20) + 4) // 3  # three characters each
    begun = text[: 3 * tokens].partition("</tool_call>")[2]
    for choice, content in (("required", None), ("any", None), ("auto", begun)):
        [answer] = client.chat.completions.create(**body(text, tool_choice=choice, max_tokens=tokens)).choices
        assert answer.finish_reason == "length"
        assert (len(answer.message.tool_calls), answer.message.content) == (1, content)


def test_a_call_cut_short_ends_with_length(client):
    text = f'<tool_call>{{"name": "get_weather", "arguments": {OSLO}}}</tool_call>'
    [choice] = client.chat.completions.create(**body(text, max_tokens=19)).choices
    assert choice.finish_reason == "length"
    assert OSLO.startswith(choice.message.tool_calls[0].function.arguments)


def test_one_call_only_where_the_client_wants_no_more(client, said):
    [choice] = client.chat.completions.create(**body(said, parallel_tool_calls=False)).choices
    assert [call.function.arguments for call in choice.message.tool_calls] == [ZURICH]


def test_where_nothing_may_be_called_everything_is_content(client, engine, said):
    for fields in ({"tool_choice": "none"}, {"tools": []}):
        [choice] = client.chat.completions.create(**body(said, **fields)).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (said, None, "stop")
        assert "tools" not in engine.tokenizer.rendered[-1][1]


def test_only_allowed_tools_may_be_called(client, engine):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    [choice] = client.chat.completions.create(**body(SAID["hermes"], tool_choice=choice)).choices
    assert choice.message.tool_calls is None
    assert [tool["function"]["name"] for tool in engine.tokenizer.rendered[-1][1]["tools"]] == ["get_time"]


def test_every_answer_has_its_own_calls(client):
    text = '<tool_call>{"name": "get_time"}</tool_call>'
    choices = client.chat.completions.create(**body(text, n=3)).choices
    assert [choice.message.tool_calls[0].function.name for choice in choices] == ["get_time"] * 3
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3


def test_the_older_fields_for_functions(http):
    request = body(SAID["hermes"], tools=None, functions=[WEATHER["function"]], function_call="auto")
    [choice] = http.post("/v1/chat/completions", json=request).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": ZURICH}
    assert "tool_calls" not in choice["message"]
    response = http.post("/v1/chat/completions", json={**request, "stream": True})
    *chunks, _ = events(response)
    pieces = [delta["function_call"] for chunk in chunks if "function_call" in (delta := chunk["choices"][0]["delta"])]
    assert [piece.get("name") for piece in pieces] == ["get_weather"] + [None] * (len(pieces) - 1)
    assert "".join(piece["arguments"] for piece in pieces) == ZURICH
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


QWEN = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>".format(
    "".join(f"<parameter={name}>\n7\n</parameter>\n" for name in ("city", "days"))
)
GLM = "<tool_call>get_weather\n{}</tool_call>".format(
    "".join(f"<arg_key>{name}</arg_key>\n<arg_value>7</arg_value>\n" for name in ("city", "days"))
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("sign", "text"), [("<parameter=", QWEN), ("<arg_key>", GLM)])
def test_schemas_tell_the_types_of_arguments_that_are_written_as_text(client, engine, sign, text, stream):
    engine.tokenizer.template = ChatTemplate({"default": "{{ tools }}<tool_call>" + sign}, {})
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": properties}}}
    request = body(f"I look.\n\n{text}", tools=[tool])
    if stream:
        with client.chat.completions.stream(**request) as events:
            list(events)
            [choice] = events.get_final_completion().choices
    else:
        [choice] = client.chat.completions.create(**request).choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "7", "days": 7}']


def test_control_tokens_are_seen_only_where_calls_are_written_with_them(client, engine):
    client.chat.completions.create(**body("x"))
    assert engine.seen[-1].skip_special_tokens
    engine.tokenizer.control_texts = ("</tool_call>", "<tool_call>", "<e>")
    [choice] = client.chat.completions.create(**body('So <e><tool_call>{"name": "get_time"}</tool_call>')).choices
    assert not engine.seen[-1].skip_special_tokens
    assert (choice.message.content, len(choice.message.tool_calls)) == ("So", 1)
    client.chat.completions.create(**body("x", tools=[]))
    assert engine.seen[-1].skip_special_tokens


@pytest.mark.parametrize(
    ("stop", "reason", "arguments"),
    [
        ("Oslo", "stop", [ZURICH, '{"city": "']),
        ("richly", "tool_calls", [ZURICH, OSLO]),
        ("\n</tool_call>", "tool_calls", [ZURICH, OSLO]),
        ("</tool_call>", "tool_calls", [ZURICH]),
    ],
)
def test_a_call_that_a_stop_string_has_cut_is_no_finished_one(client, stop, reason, arguments):
    [choice] = client.chat.completions.create(**body(SAID["hermes"], stop=stop)).choices
    assert (choice.finish_reason, [call.function.arguments for call in choice.message.tool_calls]) == (reason, arguments)


@pytest.mark.parametrize(
    ("said", "choice", "reason"),
    [
        ("hermes", "required", "tool_calls"),
        ("llama", {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}}, "tool_calls"),
        ("mistral", {"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ],
    indirect=["said"],
)
def test_a_call_is_forced_by_a_grammar(client, engine, said, choice, reason):
    [answered] = client.chat.completions.create(**body(said, tool_choice=choice)).choices
    assert answered.finish_reason == reason
    assert len(answered.message.tool_calls) == (1 if reason == "stop" else 2)
    structure = engine.seen[-1].structured_output
    assert structure.kind == "grammar"
    assert '\\"name\\": \\"get_weather\\"' in structure.text
    assert ("get_time" in structure.text) == (choice == "required")


def test_strict_functions_bound_what_a_free_model_writes(client, engine, said):
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    [choice] = client.chat.completions.create(**body(said, tools=[strict, TIME])).choices
    assert len(choice.message.tool_calls) == 2
    structure = engine.seen[-1].structured_output
    assert structure.kind == "grammar"
    assert "text: /" in structure.text
    assert '"city"' in structure.text
    assert "strict" not in str(engine.tokenizer.rendered[-1])


def test_an_answer_s_form_and_calls_go_together(client, engine):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"answer": {}}}}}
    client.chat.completions.create(**body(SAID["hermes"], response_format=form))
    assert "start: calls | content" in engine.seen[-1].structured_output.text
    client.chat.completions.create(**body("x", response_format=form, tool_choice="none"))
    assert engine.seen[-1].structured_output.kind == "json"
    client.chat.completions.create(**body("x", response_format=form, tool_choice="required"))
    assert "answer" not in engine.seen[-1].structured_output.text
    with pytest.raises(openai.BadRequestError, match="structured_outputs and tools") as refusal:
        client.chat.completions.create(**body("x", extra_body={"structured_outputs": {"regex": "a"}}))
    assert refusal.value.param == "structured_outputs"


def test_a_forced_call_is_written_with_the_control_tokens_of_the_model(client, engine):
    engine.tokenizer.template = ChatTemplate({"default": "{{ tools }}[TOOL_CALLS][ARGS]"}, {})
    engine.tokenizer.control_texts = ("[TOOL_CALLS]", "[ARGS]")
    engine.tokenizer.encode = lambda text, **_: [{"[TOOL_CALLS]": 5, "[ARGS]": 32}.get(text, 9)]
    client.chat.completions.create(**body("", tools=[TIME], tool_choice="required", max_tokens=1))
    assert 'call_0: "get_time" <[32]> %json' in engine.seen[-1].structured_output.text
    assert "calls: <[5]> call" in engine.seen[-1].structured_output.text
    assert not engine.seen[-1].skip_special_tokens


@pytest.mark.parametrize(
    "parameters",
    [
        *({}, {"parameters": None}, {"parameters": {"type": "object", "properties": {}}}),
        {"parameters": {"type": "object", "properties": {}, "required": [], "$defs": {}}},
    ],
)
def test_a_forced_call_of_a_function_without_parameters_has_no_arguments(http, engine, parameters):
    tool = {"type": "function", "function": {"name": "now", **parameters}}
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    request = body(text, tools=[tool], tool_choice="required")
    [whole] = http.post("/v1/chat/completions", json=request).json()["choices"]
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    [schema] = schemas_by_tool(engine.seen[-1].structured_output).values()
    assert (schema["properties"], schema["additionalProperties"]) == ({}, False)
    rendered = engine.tokenizer.rendered[-1][1]["tools"][0]["function"]["parameters"]
    assert rendered == (parameters.get("parameters") or {"type": "object", "properties": {}})
    response = http.post("/v1/chat/completions", json={**request, "stream": True})
    *chunks, _ = events(response)
    pieces = [piece["function"] for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(piece.get("arguments", "") for piece in pieces) == "{}"


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "object"}, {}, {"properties": {}, "additionalProperties": {"type": "integer"}}),
        *({"properties": {}, kind: [CITY]} for kind in ("anyOf", "oneOf", "allOf")),
        {"properties": {}, "$ref": "#/$defs/city", "$defs": {"city": CITY}},
        {"properties": {}, "required": ["city"]},
    ],
)
def test_a_function_with_arguments_of_any_name_keeps_them(client, engine, schema):
    tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
    client.chat.completions.create(**body("", tools=[tool], tool_choice="required"))
    [forced] = schemas_by_tool(engine.seen[-1].structured_output).values()
    assert forced.get("additionalProperties") is not False


def test_a_forced_call_has_no_other_arguments_than_the_function_names(client, engine):
    for schema, closed in ((CITY, False), ({**CITY, "additionalProperties": True}, True), ({**CITY, "required": ["country"]}, None)):
        tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
        client.chat.completions.create(**body("", tools=[tool], tool_choice="required"))
        [forced] = schemas_by_tool(engine.seen[-1].structured_output).values()
        assert forced.get("additionalProperties") is closed


@pytest.mark.parametrize("schema", [{"type": "array"}, {"properties": {"a": {"minItems": 10**9}}}, {"pattern": "a" * 10_000}])
def test_what_no_call_can_be_forced_for(client, schema):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**body("", tools=tools, tool_choice="required"))
    assert refusal.value.param == "tools"


def test_logprobs_of_held_back_tokens_come_with_the_next_piece(client):
    text = '<tool_call>{"name": "get_time"}</tool_call>'
    chunks = list(client.chat.completions.create(**body(text, stream=True, logprobs=True, top_logprobs=1)))
    counts = [len(chunk.choices[0].logprobs.content) for chunk in chunks if chunk.choices[0].logprobs]
    [choice] = client.chat.completions.create(**body(text, logprobs=True)).choices
    assert sum(counts) == len(choice.logprobs.content) == -(-len(text) // 3) + 1


def test_a_template_is_given_calls_and_tools_as_it_expects_them(client, engine):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "get_time", "arguments": '{"a": [1]}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "assistant", "content": None, "function_call": {"name": "get_time", "arguments": "{"}},
        {"role": "function", "name": "get_time", "content": "y"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages, tools=[TIME], max_tokens=1)
    conversation, variables = engine.tokenizer.rendered[-1]
    assert variables["tools"] == [{**TIME, "function": {**TIME["function"], "parameters": {"type": "object", "properties": {}}}}]
    assert conversation[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "get_time", "arguments": {"a": [1]}}}],
    }
    assert conversation[2] == {"role": "tool", "tool_call_id": "a", "content": "noon"}
    assert conversation[3]["tool_calls"] == [{"type": "function", "function": {"name": "get_time", "arguments": "{"}}]
    assert conversation[4] == {"role": "tool", "name": "get_time", "content": "y"}


def test_a_template_that_knows_no_tools_is_given_them_as_text(client, engine):
    engine.tokenizer.template = ChatTemplate({"default": "{{ messages }} [TOOL_CALLS]"}, {})
    called = {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Two.", "tool_calls": [called, called]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "tool", "tool_call_id": "a", "content": "night"},
        {"role": "user", "content": f"SAY:{SAID['hermes']}"},
    ]
    [choice] = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER, TIME]).choices
    assert [call.function.arguments for call in choice.message.tool_calls] == [ZURICH, OSLO]
    (system, assistant, results), variables = engine.tokenizer.rendered[-1]
    assert "tools" not in variables
    assert system["content"].startswith("Be brief.\n\n")
    assert json.dumps(WEATHER["function"]) in system["content"]
    assert "<tool_call>" in system["content"]
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"Two.\n{call}\n{call}"}
    reported = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nnight\n</tool_response>"
    assert results == {"role": "user", "content": f"{reported}\nSAY:{SAID['hermes']}"}


ALTERNATING = """{%- for message in messages if message.role != 'system' -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{{ message.role }}: {{ message.content }}
{% endfor -%}"""


@pytest.mark.parametrize(
    "system",
    ["{{ messages[0].content if messages[0].role == 'system' }}", "{{ raise_exception('no') if messages[0].role == 'system' }}", ""],
)
def test_tools_fit_into_templates_of_alternating_roles_and_without_a_system_message(system):
    template = ChatTemplate({"default": system + ALTERNATING}, {})
    user, call = {"role": "user", "content": "Hello"}, {"type": "function", "function": {"name": "get_time", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    result = {"role": "tool", "content": "noon"}
    inputs = ChatModel(SimpleNamespace(template=template), 0).template_inputs(
        [user, called, result, result, user], {}, ToolSpec((Function(name="get_time"),))
    )
    [(text, _)] = template.render(inputs.conversation, ())
    assert text.index('{"name": "get_time", "parameters"') < text.index("Hello")
    assert text.endswith(2 * "<tool_response>\nnoon\n</tool_response>\n" + "Hello\n")


def test_the_operator_may_say_how_the_model_writes_calls(client, server, monkeypatch):
    monkeypatch.setattr(server[1].default, "tool_call_parser", "mistral")
    [choice] = client.chat.completions.create(**body(SAID["mistral"])).choices
    assert len(choice.message.tool_calls) == 2
