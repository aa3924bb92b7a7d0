import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from scripted_engine import CACHED, answer
from server_here import MODEL

from chairlift.chat.answer import Delta
from chairlift.chat.tools.parser import ToolCallDelta

pytestmark = pytest.mark.shared_server

RESPONSE, EVENT = TypeAdapter(Response), TypeAdapter(ResponseStreamEvent)
HOT = {"type": "function", "name": "hot", "description": "is it", "parameters": {"type": "object"}, "strict": False}
CALLS = [
    Delta(0, "let me see"),
    Delta(0, calls=[ToolCallDelta(0, '{"in": ', id="call_1", name="hot")]),
    Delta(0, calls=[ToolCallDelta(0, '"Rome"}'), ToolCallDelta(1, "{}", id="call_2", name="hot")]),
    Delta(0, finish_reason="tool_calls"),
]


def events(response):
    """The events of a stream, each checked: its name is its type, and it has its number."""
    reported = []
    for index, event in enumerate(response.text.strip().split("\n\n")):
        name, data = event.split("\n")
        reported.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {reported[-1]['type']}"
        assert reported[-1]["sequence_number"] == index
        EVENT.validate_python(reported[-1])
    return reported


def test_a_whole_answer_has_openai_s_shape(http, engine):
    engine.shown = CACHED
    requested = {"model": MODEL, "input": "one two", "max_output_tokens": 3, "instructions": "be brief", "metadata": {"a": "b"}}
    body = http.post("/v1/responses", json=requested).json()
    answered = RESPONSE.validate_python(body)
    assert answered.output_text == answer("be brief one two", 3)
    assert (answered.status, answered.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answered.output[0].status == "incomplete"
    assert (answered.usage.input_tokens, answered.usage.output_tokens, answered.usage.total_tokens) == (16, 3, 19)
    assert answered.usage.input_tokens_details.cached_tokens == 3
    assert (answered.instructions, answered.metadata, answered.model) == ("be brief", {"a": "b"}, MODEL)


def test_a_response_tells_the_sampling_that_was_used(http, engine, monkeypatch):
    engine.describe(default_sampling={"temperature": 0.25})
    asked = {"input": "one", "max_output_tokens": 1, "stream": True}
    too_long = {**asked, "input": "a " * 3000}
    for body, used in ((asked, (0.25, 1.0)), ({**asked, "temperature": 0.0, "top_p": 0.5}, (0.0, 0.5)), (too_long, (0.25, 1.0))):
        reported = [json.loads(event.partition("data: ")[2]) for event in http.post("/v1/responses", json=body).text.strip().split("\n\n")]
        responses = [event["response"] for event in reported if "response" in event]
        assert {(response["temperature"], response["top_p"]) for response in responses} == {used}
        assert body is too_long or (engine.seen[-1].temperature, engine.seen[-1].top_p) == used


def test_a_stream_tells_the_whole_story(http):
    reported = events(http.post("/v1/responses", json={"input": "one two", "max_output_tokens": 2, "stream": True}))
    assert [event["type"].removeprefix("response.") for event in reported] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert "".join(event["delta"] for event in reported if event["type"].endswith("delta")) == reported[6]["text"] == answer("one two", 2)
    assert reported[-1]["response"]["output"] == [reported[-2]["item"]]
    assert reported[-1]["response"]["usage"]["output_tokens"] == 2
    assert reported[0]["response"]["output"] == []


def test_a_number_that_json_cannot_say_is_repeated_as_null(http):
    body, kind = '{"input": "one", "max_output_tokens": 1, "metadata": {"a": 1e999}', {"content-type": "application/json"}
    assert http.post("/v1/responses", content=body + "}", headers=kind).json()["metadata"] == {"a": None}
    streamed = http.post("/v1/responses", content=body + ', "stream": true}', headers=kind).text
    assert '"metadata":{"a":null}' in streamed
    assert "Infinity" not in streamed


def test_calls_are_items_of_their_own(http, says):
    says(*CALLS)
    requested = {"input": "how is it", "tools": [HOT]}
    whole = RESPONSE.validate_python(http.post("/v1/responses", json=requested).json())
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert (whole.output_text, whole.status) == ("let me see", "completed")
    assert [(call.call_id, call.arguments) for call in whole.output[1:]] == [("call_1", '{"in": "Rome"}'), ("call_2", "{}")]
    reported = events(http.post("/v1/responses", json=requested | {"stream": True}))
    pieces = [(event["output_index"], event["delta"]) for event in reported if event["type"].endswith("arguments.delta")]
    assert pieces == [(1, '{"in": '), (1, '"Rome"}'), (2, "{}")]
    names = [event["type"].rpartition(".")[2] for event in reported if "item" in event]
    assert names == ["added", "done"] * 3
    unnumbered = [
        [{k: v for k, v in item.items() if k != "id"} for item in items]
        for items in (whole.to_dict()["output"], reported[-1]["response"]["output"])
    ]
    assert unnumbered[0] == unnumbered[1]


def test_an_answer_without_a_word_is_an_empty_message(http, says):
    says(Delta(0, finish_reason="stop"))
    [item] = http.post("/v1/responses", json={"input": "hush"}).json()["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_items_become_a_conversation(client, engine):
    items = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "very"}, {"type": "input_text", "text": "brief"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "and", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "hot", "arguments": '{"in": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "now"},
    ]
    answered = client.responses.create(model=MODEL, input=items, max_output_tokens=5, temperature=0.5, top_p=0.25, extra_body={"seed": 7})
    assert answered.output_text == "be very brief and now "
    *_, said, result = engine.tokenizer.rendered[-1][0]
    assert [(call["id"], call["function"]) for call in said["tool_calls"]] == [("call_1", {"name": "hot", "arguments": {"in": "Rome"}})]
    assert (result["role"], result["tool_call_id"]) == ("tool", "call_1")
    assert (engine.seen[0].temperature, engine.seen[0].top_p, engine.seen[0].seed) == (0.5, 0.25, 7)


def test_reasoning_in_several_items_belongs_to_what_follows(http, engine):
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}] if text else []} for text in ("", "one", "two")]
    items = [{"role": "user", "content": "hi"}, *thoughts, {"role": "assistant", "content": "well"}, {"role": "user", "content": "and"}]
    assert http.post("/v1/responses", json={"input": items, "max_output_tokens": 1}).status_code == 200
    assert engine.tokenizer.rendered[-1][0][1]["reasoning_content"] == "one\ntwo"


SPACE = {"type": "namespace", "name": "mcp__city__", "description": "of cities", "tools": [HOT, {"type": "custom", "name": "ask"}]}


def test_tools_of_a_namespace_are_tools(http, engine, says):
    """So Codex sends the tools of MCP servers, and it finds a call only by both names."""
    call = {"type": "function_call", "call_id": "call_0", "namespace": "mcp__city__", "name": "hot", "arguments": "{}"}
    items = [{"role": "user", "content": "how is it"}, call, {"type": "function_call_output", "call_id": "call_0", "output": "warm"}]
    requested = {"input": items, "tools": [SPACE, {"type": "web_search"}], "max_output_tokens": 1}
    response = http.post("/v1/responses", json=requested)
    assert (response.status_code, response.headers["x-chairlift-ignored"]) == (200, "tools.web_search")
    conversation, variables = engine.tokenizer.rendered[-1]
    assert '"name": "mcp__city__hot"' in json.dumps([conversation, variables], default=str).replace("\\", "")
    says(
        Delta(0, calls=[ToolCallDelta(0, "{}", id="call_1", name="mcp__city__hot")]),
        Delta(0, calls=[ToolCallDelta(1, "b", id="call_2", name="mcp__city__ask", custom=True)]),
        Delta(0, finish_reason="tool_calls"),
    )
    whole = RESPONSE.validate_python(http.post("/v1/responses", json=requested).json())
    named = [("function_call", "mcp__city__", "hot"), ("custom_tool_call", "mcp__city__", "ask")]
    assert [(item.type, item.namespace, item.name) for item in whole.output] == named
    assert whole.to_dict()["tools"][0] == SPACE
    reported = events(http.post("/v1/responses", json=requested | {"stream": True}))
    items = [event["item"] for event in reported if "item" in event]
    assert [(item["type"], item["namespace"], item["name"]) for item in items] == [one for one in named for _ in range(2)]


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": {}}, {"arguments": []}])
@pytest.mark.parametrize("nothing", [None, [], ""])
def test_what_is_empty_in_a_conversation_is_sent_in_many_ways(http, engine, arguments, nothing):
    items = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": nothing},
        {"type": "function_call", "call_id": "call_1", "name": "hot", **arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": nothing},
    ]
    assert http.post("/v1/responses", json={"input": items, "max_output_tokens": 1}).status_code == 200
    _, said, result = engine.tokenizer.rendered[-1][0]
    assert (said["content"], said["tool_calls"][0]["function"]["arguments"], result["content"]) == ("", {}, "")


@pytest.mark.parametrize(
    ("choice", "status"),
    [
        ({"type": "function", "name": "hot", "namespace": "mcp__city__"}, 200),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "hot", "namespace": "mcp__city__"}]}, 200),
        ({"type": "function", "name": "hot"}, 400),
    ],
)
def test_a_tool_of_a_namespace_is_chosen_by_both_names(http, choice, status):
    requested = {"input": "hi", "tools": [SPACE], "max_output_tokens": 1, "tool_choice": choice}
    assert http.post("/v1/responses", json=requested).status_code == status


def test_what_other_servers_added_to_a_conversation(http, engine):
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    items = [
        {"role": "user", "content": "look"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "mcp_list_tools", "id": "m", "server_label": "a", "tools": []},
        {"type": "function_call", "call_id": "call_1", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "here"}, image]},
    ]
    assert http.post("/v1/responses", json={"input": items, "max_output_tokens": 1}).status_code == 200
    rendered = engine.tokenizer.rendered[-1][0]
    assert [turn["role"] for turn in rendered] == ["user", "assistant", "tool"]
    assert rendered[-1]["content"] == "here\n[image: this model reads only text]"
    refused = http.post("/v1/responses", json={"input": [items[0], {"type": "item_reference", "id": "rs_1"}]})
    assert (refused.status_code, "stores none" in refused.json()["error"]["message"]) == (400, True)


def test_the_openai_client_streams_and_parses(client, says):
    class City(BaseModel):
        name: str

    with client.responses.stream(model=MODEL, input="one two", max_output_tokens=2) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == answer("one two", 2)
    says(Delta(0, '{"name": '), Delta(0, '"Rome"}', finish_reason="stop"))
    with client.responses.stream(model=MODEL, input="where") as stream:
        list(stream)
        assert stream.get_final_response().output_text == '{"name": "Rome"}'
    assert client.responses.parse(model=MODEL, input="where", text_format=City).output_parsed == City(name="Rome")


def test_a_schema_bounds_the_answer(http, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    assert (
        http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, "text": {"format": wanted}}).json()["text"]["format"]
        == wanted
    )
    assert http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, "structured_outputs": {"choice": ["b"]}}).is_success
    assert [params.structured_output.kind for params in engine.seen] == ["json", "choice"]
    assert json.loads(engine.seen[0].structured_output.text) == schema


def test_logprobs_are_told_with_the_text(http):
    requested = {"input": "one", "max_output_tokens": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    body = http.post("/v1/responses", json=requested).json()
    RESPONSE.validate_python(body)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert [(one["logprob"], len(one["top_logprobs"])) for one in logprobs] == [(-0.75, 1)] * 2


def test_a_failure_in_mid_stream_is_told_as_one(http, client):
    reported = events(http.post("/v1/responses", json={"input": "boom now", "max_output_tokens": 9, "stream": True}))
    assert reported[-1]["type"] == "response.failed"
    assert "no usable answer" in reported[-1]["response"]["error"]["message"]
    assert reported[-1]["response"]["status"] == "failed"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="full house", max_output_tokens=2, stream=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"]}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": None}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "hot", "arguments": [1]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": "a " * 3000}, "input"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [HOT], "tool_choice": {"type": "function", "name": "cold"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "sound"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_requests_that_cannot_be_served(http, engine, fields, param):
    response = http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 4, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.started == 0


def test_the_tokens_of_an_input_are_counted(client, engine):
    requested = {"model": MODEL, "input": "one two", "instructions": "be brief"}
    counted = client.responses.input_tokens.count(**requested)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 16)
    assert engine.started == 0
    assert client.responses.create(**requested, max_output_tokens=1).usage.input_tokens == 16


def test_a_stream_says_as_openai_does_that_the_input_is_too_long(http):
    long = {"input": "a " * 1500}
    refused = http.post("/v1/responses", json=long)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    counted = rejected(http)
    response = http.post("/v1/responses", json={**long, "stream": True})
    assert response.status_code == 200
    created, failed = [json.loads(event.partition("data: ")[2]) for event in response.text.strip().split("\n\n")]
    EVENT.validate_python(created)
    assert (created["type"], failed["type"], failed["sequence_number"]) == ("response.created", "response.failed", 1)
    error = failed["response"]["error"]
    assert (failed["response"]["status"], error["code"]) == ("failed", "context_length_exceeded")
    assert error["message"].startswith("Your input exceeds the context window of this model.")
    assert rejected(http) == counted + 1
    explained = http.get(f"/v1/requests/{response.headers['x-request-id']}/explain").json()
    assert (explained["refused"]["status"], explained["refused"]["code"]) == (400, "context_length_exceeded")


def rejected(http):
    """Invalid requests so far."""
    [line] = [
        line for line in http.get("/metrics").text.splitlines() if "admission_rejections_total{" in line and 'reason="invalid"' in line
    ]
    return float(line.split()[-1])
