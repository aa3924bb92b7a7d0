"""Custom tools, whose input is text, and tools of types that the server does not know."""

import json

import anthropic
import pytest
from events import events, objects
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from server_here import MODEL

from chairlift.chat.tools.custom import CustomCalls
from chairlift.chat.tools.parser import ToolCallDelta

pytestmark = pytest.mark.shared_server

PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits a file."}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
INPUT = 'print("é")\n*** End'
CALL = f"<tool_call>{json.dumps({'name': 'patch', 'arguments': {'input': INPUT}})}</tool_call>"
OTHER = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


def body(text, **fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": f"SAY:{text}"}], "tools": [PATCH, TIME], **fields}


def test_a_custom_tool_is_called_with_text(client, engine):
    choice = client.chat.completions.create(**body(f"I edit. {CALL}{OTHER}{CALL}")).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I edit.", "tool_calls")
    first, second, third = choice.message.tool_calls
    assert (first.type, first.custom.name, first.custom.input) == ("custom", "patch", INPUT)
    assert (second.type, second.function.name) == ("function", "get_time")
    assert third.custom.input == INPUT
    shown = engine.tokenizer.rendered[-1][1]["tools"][0]
    assert shown["function"]["name"] == "patch"
    assert shown["function"]["parameters"]["required"] == ["input"]


def test_a_stream_has_the_input_as_a_whole(http):
    response = http.post("/v1/chat/completions", json=body(f"{CALL}{OTHER}", stream=True))
    *chunks, _ = events(response)
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0] == {"index": 0, "id": calls[0]["id"], "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert calls[1] == {"index": 0, "custom": {"input": INPUT}}
    assert calls[2]["function"]["name"] == "get_time"


def test_a_custom_tool_may_be_forced(client, engine):
    choice = {"type": "custom", "custom": {"name": "patch"}}
    client.chat.completions.create(**body("x", tool_choice=choice))
    assert "call_0" in engine.seen[-1].structured_output.text
    assert "get_time" not in engine.seen[-1].structured_output.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "cut o', "cut o"),
        ('{"input": 7}', '{"input": 7}'),
        ("{oops}", "{oops}"),
        ("[1]", "[1]"),
        ("", ""),
    ],
)
def test_the_input_is_what_the_model_wrote_as_far_as_it_can_be_read(arguments, text):
    calls = CustomCalls({"patch"})
    [begun] = calls.push(ToolCallDelta(0, id="a", name="patch"))
    assert begun.custom
    for character in arguments:
        assert calls.push(ToolCallDelta(0, character)) == []
    assert calls.end() == [ToolCallDelta(0, text, custom=True)]
    assert calls.end() == []


def test_the_model_sees_the_grammar_of_the_input(client, engine):
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    tool = {"type": "custom", "custom": {"name": "patch", "format": grammar}}
    client.chat.completions.create(**body("x", tools=[tool]))
    assert engine.tokenizer.rendered[-1][1]["tools"][0]["function"]["description"].endswith('lark grammar:\nstart: "a"')


def test_calls_and_results_of_custom_tools_are_sent_back(client, engine):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "patch", "input": "abc"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages, tools=[PATCH], max_tokens=1)
    assert engine.tokenizer.rendered[-1][0][1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "abc"}}


def test_responses_have_items_of_custom_tools(client, http, engine):
    tool = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
    fields = {"model": MODEL, "input": f"SAY:{CALL}", "tools": [tool, {"type": "web_search", "search_context_size": "low"}]}
    answer = client.responses.create(**fields)
    [item] = answer.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", INPUT)
    assert [tool.type for tool in answer.tools] == ["custom", "web_search"]
    reported = objects(http.post("/v1/responses", json=fields | {"stream": True}).text)
    for event in reported:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    [done] = [event for event in reported if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == INPUT
    sent = [
        {"type": "custom_tool_call", "call_id": item.call_id, "name": "patch", "input": "abc"},
        {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"},
    ]
    client.responses.create(model=MODEL, input=sent, tools=[tool], max_output_tokens=16)
    called, result = engine.tokenizer.rendered[-1][0]
    assert called["tool_calls"][0]["function"]["arguments"] == {"input": "abc"}
    assert result["content"] == "done"


def test_unknown_tools_are_left_out_with_a_note(client, engine, base, caplog):
    caplog.set_level("INFO", "chairlift")
    response = client.chat.completions.with_raw_response.create(**body("x", tools=[{"type": "web_search"}, TIME, {"type": "x" * 99}]))
    assert response.headers["x-chairlift-ignored"] == f"tools.web_search, tools.{'x' * 58}"
    assert "left out tools of types 'web_search'" in caplog.text
    assert engine.tokenizer.rendered[-1][1]["tools"] == [TIME]
    with anthropic.Anthropic(base_url=base, api_key="any", max_retries=0) as claude:
        tools = [{"type": "bash_20250124", "name": "bash"}, {"name": "f", "input_schema": {"type": "object"}}]
        response = claude.messages.with_raw_response.create(
            model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "x"}], tools=tools
        )
        assert response.headers["x-chairlift-ignored"] == "tools.bash_20250124"
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema is missing"):
            claude.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "x"}], tools=[{"name": "f"}])
