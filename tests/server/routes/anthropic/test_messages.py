import json

import anthropic
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from cpu_cost import cost
from pydantic import TypeAdapter
from scripted_engine import CACHED, answer
from server_here import MODEL

from chairlift.chat.answer import Delta
from chairlift.chat.tools.parser import ToolCallDelta
from chairlift.server.routes.anthropic.message_request import MessagesRequest

pytestmark = pytest.mark.shared_server

EVENT = TypeAdapter(RawMessageStreamEvent)
HOT = {"name": "hot", "description": "is it", "input_schema": {"type": "object"}}
ONE = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "one two"}]}


@pytest.fixture(scope="module")
def claude(lasting):
    """Anthropic's own client."""
    with anthropic.Anthropic(base_url=lasting[1], api_key="any", max_retries=0, timeout=30) as client:
        yield client


def test_a_whole_answer_has_anthropic_s_shape(http, engine):
    engine.shown = CACHED
    body = http.post("/v1/messages", json={**ONE, "system": "be brief", "stop_sequences": ["never"]}).json()
    answered = TypeAdapter(Message).validate_python(body, strict=True)
    assert answered.content[0].text == answer("be brief one two", 4)
    # The client for TypeScript calls these fields null where nothing is to be said, never missing.
    for part, optional in ((answered, {"diagnostics"}), (answered.usage, {"speed"}), (answered.content[0], set())):
        assert part.model_fields_set >= type(part).model_fields.keys() - optional
    assert (answered.usage.service_tier, answered.usage.output_tokens_details) == ("standard", None)
    assert (answered.stop_reason, answered.stop_sequence, answered.model) == ("max_tokens", None, MODEL)
    usage = answered.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.output_tokens) == (0, 3, 13, 4)


def test_an_answer_ends_with_the_context_however_many_tokens_are_allowed(http, engine):
    long = {"model": MODEL, "max_tokens": 32_000, "messages": [{"role": "user", "content": "a " * 1020}]}
    whole = http.post("/v1/messages", json=long).json()
    assert (whole["stop_reason"], sum(whole["usage"][name] for name in whole["usage"] if name.endswith("_tokens"))) == (
        "model_context_window_exceeded",
        2048,
    )
    assert engine.seen[-1].max_tokens == whole["usage"]["output_tokens"] < 10
    fits = http.post("/v1/messages", json={**long, "max_tokens": engine.seen[-1].max_tokens}).json()
    assert fits["stop_reason"] == "max_tokens"


def test_a_stream_tells_the_whole_story(http):
    response = http.post("/v1/messages", json={**ONE, "stream": True})
    reported = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        reported.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {reported[-1]['type']}"
        if reported[-1]["type"] != "ping":
            EVENT.validate_python(reported[-1], strict=True)
    assert [event["type"] for event in reported] == [
        *("message_start", "ping", "content_block_start", *["content_block_delta"] * 4),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "".join(event["delta"]["text"] for event in reported[3:7]) == answer("one two", 4)
    assert reported[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None, "stop_details": None, "container": None}
    assert reported[-2]["usage"].keys() >= {"output_tokens_details", "server_tool_use"}
    assert reported[0]["message"].keys() >= {"stop_details", "container"}
    assert reported[2]["content_block"] == {"type": "text", "text": "", "citations": None}
    assert reported[-2]["usage"]["output_tokens"] == 4


def test_the_anthropic_client_creates_streams_and_counts(claude, engine):
    engine.shown = CACHED
    assert claude.messages.create(**ONE).content[0].text == answer("one two", 4)
    with claude.messages.stream(**ONE) as stream:
        assert "".join(stream.text_stream) == answer("one two", 4)
        assert stream.get_final_message().usage.cache_read_input_tokens == 3
    assert claude.messages.count_tokens(model=MODEL, messages=ONE["messages"], system="be").input_tokens == len("be one two")
    [listed] = claude.models.list()
    assert (listed.id, listed.lifecycle, listed.max_input_tokens) == (MODEL, "active", 2048)
    assert listed.model_fields_set >= ModelInfo.model_fields.keys()


def test_calls_are_blocks_of_their_own(claude, says):
    says(
        Delta(0, "let me see"),
        Delta(0, calls=[ToolCallDelta(0, '{"in": ', id="call_1", name="hot")]),
        Delta(0, calls=[ToolCallDelta(0, '"Rome"}'), ToolCallDelta(1, id="call_2", name="hot")]),
        Delta(0, finish_reason="tool_calls"),
    )
    whole = claude.messages.create(**ONE, tools=[HOT])
    with claude.messages.stream(**ONE, tools=[HOT]) as stream:
        list(stream)
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert message.content[0].text == "let me see"
        assert {call.caller.type for call in message.content[1:]} == {"direct"}
        assert [(call.id, call.name, call.input) for call in message.content[1:]] == [
            ("call_1", "hot", {"in": "Rome"}),
            ("call_2", "hot", {}),
        ]


def test_a_call_that_is_cut_off_has_what_there_is_of_it(claude, says):
    says(Delta(0, calls=[ToolCallDelta(0, '{"in": "Rome", "at": "no', id="call_1", name="hot")]), Delta(0, finish_reason="length"))
    assert claude.messages.create(**ONE, tools=[HOT]).content[0].input == {"in": "Rome", "at": "no"}
    says(Delta(0, calls=[ToolCallDelta(0, "in Rome", id="call_1", name="hot")]), Delta(0, finish_reason="length"))
    assert claude.messages.create(**ONE, tools=[HOT]).content[0].input == {}


def test_numbers_that_json_cannot_say_are_null(claude, says):
    says(Delta(0, calls=[ToolCallDelta(0, '{"in": 1e999, "at": NaN}', id="call_1", name="hot")]), Delta(0, finish_reason="tool_calls"))
    assert claude.messages.create(**ONE, tools=[HOT]).content[0].input == {"in": None, "at": None}


def test_a_call_that_the_client_named_is_a_call(claude, says):
    says(Delta(0, calls=[ToolCallDelta(0, "{}", id="call_1", name="hot")]), Delta(0, finish_reason="stop"))  # as OpenAI ends it
    assert claude.messages.create(**ONE, tools=[HOT]).stop_reason == "tool_use"


def test_the_anthropic_client_knows_a_requests_id(claude):
    named = claude.with_options(default_headers={"x-request-id": "mine"})
    assert named.messages.create(**ONE)._request_id == named.models.list()._request_id == "mine"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        named.models.retrieve("zz")
    assert (unknown.value.request_id, unknown.value.body["request_id"], unknown.value.body["type"]) == ("mine", "mine", "error")
    assert unknown.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("stop", 7, "end_turn", None),
        ("length", None, "max_tokens", None),
    ],
)
def test_why_it_ended(claude, says, finish, stop, reason, sequence):
    says(Delta(0, finish_reason=finish, stop_reason=stop))
    answered = claude.messages.create(**ONE)
    assert (answered.stop_reason, answered.stop_sequence) == (reason, sequence)
    assert [block.text for block in answered.content] == [""]


def test_blocks_become_a_conversation(claude, engine):
    said = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "very"}, {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "and"}, {"type": "tool_use", "id": "a", "name": "hot", "input": {"in": "Rome"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "here"},
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "now"}]},
            ],
        },
    ]
    system = [{"type": "text", "text": "be"}]
    answered = claude.messages.create(
        model=MODEL, max_tokens=6, messages=said, system=system, stop_sequences=["x"], extra_body={"top_k": 3, "temperature": 0.5}
    )
    assert answered.content[0].text == "be very brief and now here "
    assert [turn["role"] for turn in engine.tokenizer.rendered[-1][0]] == ["system", "user", "assistant", "tool", "user"]
    assert (engine.seen[0].stop, engine.seen[0].top_k, engine.seen[0].temperature) == (("x",), 3, 0.5)


USER = {"role": "user", "content": "one"}
ASSISTANT = {"role": "assistant", "content": "two"}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "hot", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "warm"}]}
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
REMINDER = "<system-reminder>\nbe brief\n</system-reminder>"


@pytest.mark.parametrize(
    ("messages", "conversation"),
    [
        ([SYSTEM, USER], [("system", "be brief"), ("user", "one")]),
        ([USER, SYSTEM], [("user", f"one\n{REMINDER}")]),
        ([USER, SYSTEM, SYSTEM, USER], [("user", f"one\n{REMINDER}\n{REMINDER}"), ("user", "one")]),
        ([USER, ASSISTANT, SYSTEM, USER], [("user", "one"), ("assistant", "two"), ("user", f"{REMINDER}\none")]),
        ([USER, ASSISTANT, SYSTEM], [("user", "one"), ("assistant", "two"), ("user", REMINDER)]),
        ([USER, CALLED, RESULT, SYSTEM], [("user", "one"), ("assistant", ""), ("tool", f"warm\n{REMINDER}")]),
        ([USER, CALLED, SYSTEM, RESULT], [("user", "one"), ("assistant", ""), ("tool", f"{REMINDER}\nwarm")]),
        ([USER, SYSTEM, ASSISTANT], [("user", f"one\n{REMINDER}"), ("assistant", "two")]),
        ([USER, ASSISTANT, SYSTEM, ASSISTANT], [("user", "one"), ("assistant", "two"), ("user", REMINDER), ("assistant", "two")]),
    ],
)
def test_system_turns_keep_their_place(claude, engine, messages, conversation):
    claude.messages.create(model=MODEL, max_tokens=1, messages=messages)
    rendered, variables = engine.tokenizer.rendered[-1]
    assert [(turn["role"], turn["content"]) for turn in rendered] == conversation
    assert variables.get("continue_final_message", False) == (messages[-1]["role"] == "assistant")


def test_many_system_turns_after_a_long_one_take_time_by_their_length():
    def request(length):
        messages = [{"role": "user", "content": "a" * length}, *[{"role": "system", "content": "b"}] * 4000]
        return MessagesRequest(model=MODEL, max_tokens=1, messages=messages)

    assert cost(request(1_500_000).chat, request(1).chat) < 3


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=HASH;"}, {"type": "text", "text": "be brief"}],
        [{"type": "text", "text": "x-anthropic-billing-header: cch=HASH;\ncch=HASH"}, {"type": "text", "text": "be brief"}],
        "X-Anthropic-Billing-Header: cch=HASH\n\nbe brief",
    ],
)
def test_the_billing_header_is_not_part_of_the_prompt(http, engine, system):
    for cch in ("1a2b3", "c4d5e"):
        sent = json.loads(json.dumps(system).replace("HASH", cch))
        assert http.post("/v1/messages", json={**ONE, "system": sent}).status_code == 200
        assert engine.tokenizer.rendered[-1][0][0] == {"role": "system", "content": "be brief"}
        counted = http.post("/v1/messages/count_tokens", json={"messages": ONE["messages"], "system": sent})
        assert counted.json() == {"input_tokens": len("be brief one two")}
    alone = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]
    http.post("/v1/messages", json={**ONE, "system": alone})
    assert [turn["role"] for turn in engine.tokenizer.rendered[-1][0]] == ["user"]


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cch=1; be brief",
        "be brief\nx-anthropic-billing-header: cch=1;",
        [{"type": "text", "text": "be brief"}, {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}],
    ],
)
def test_text_that_may_be_more_than_the_billing_header_is_kept(http, engine, system):
    assert http.post("/v1/messages", json={**ONE, "system": system}).status_code == 200
    assert "be brief" in engine.tokenizer.rendered[-1][0][0]["content"]
    assert "cch=1" in engine.tokenizer.rendered[-1][0][0]["content"]


def test_a_stream_begins_and_ends_with_the_same_counts_of_the_prompt(http, engine):
    engine.shown = CACHED
    said = {**ONE, "messages": [{"role": "user", "content": "word " * 10}], "stream": True}  # 49 tokens: three blocks of 16 and one more
    events = [json.loads(event.partition("data: ")[2]) for event in http.post("/v1/messages", json=said).text.strip().split("\n\n")]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    begin, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert [begin[name] for name in names] == [end[name] for name in names] == [2, 3, 45]


@pytest.mark.parametrize("sent", [{}, {"input": None}, {"input": ""}, {"input": {}}, {"input": []}])
def test_a_call_may_be_sent_back_without_input(http, engine, sent):
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "hot", **sent}]}
    assert http.post("/v1/messages", json={**ONE, "messages": [USER, called, RESULT]}).status_code == 200
    [assistant] = [turn for turn in engine.tokenizer.rendered[-1][0] if turn["role"] == "assistant"]
    assert "tool_calls" in assistant or '"arguments": {}' in assistant["content"]


@pytest.mark.parametrize(
    ("turn", "fields", "named"),
    [
        (CALLED, {"input": [1]}, "messages[1].content[0].input must be an object, got [1]"),
        (CALLED, {"input": 5}, "messages[1].content[0].input must be an object"),
        (CALLED, {"id": None}, "messages[1].content[0].id must be a string"),
        (CALLED, {"name": 5}, "messages[1].content[0].name must be a string"),
        (RESULT, {"tool_use_id": None}, "messages[1].content[0].tool_use_id must be a string"),
    ],
)
def test_a_wrong_block_of_a_call_is_named(http, turn, fields, named):
    wrong = {**turn, "content": [turn["content"][0] | fields]}
    response = http.post("/v1/messages", json={**ONE, "messages": [USER, wrong]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(named)


def test_a_schema_bounds_the_answer(claude, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    claude.messages.create(**ONE, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(engine.seen[0].structured_output.text) == schema


def test_an_answer_goes_on_with_what_was_begun(claude, engine):
    said = [*ONE["messages"], {"role": "assistant", "content": "three"}]
    assert claude.messages.create(model=MODEL, max_tokens=3, messages=said).content[0].text == answer("one two three", 3)
    assert engine.tokenizer.rendered[-1][1] == {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("content", [[], "", [{"type": "text", "text": ""}]])
def test_a_tool_may_give_nothing_back(claude, content):
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    call = {"type": "tool_use", "id": "a", "name": "hot", "input": {}}
    said = [*ONE["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(model=MODEL, max_tokens=2, messages=said).content[0].text == answer("one two", 2)


JSON = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "only system turns"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role"),
        ({"messages": [*ONE["messages"], {"role": "system", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images"),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, "prompt is too long: 6000 tokens > 2048 maximum"),
        ({"system": 5}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "hot"}]}, "tools[0].input_schema"),
        ({"tools": [HOT], "tool_choice": {"type": "tool", "name": "cold"}}, "cold"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature"),
        ({"output_format": JSON, "output_config": {"format": JSON}}, "output_config.format and output_format are both set"),
        ({"response_format": {"type": "json_object"}, "output_format": JSON}, "response_format and output_format are both set"),
    ],
)
def test_refusals_are_in_anthropic_s_envelope(http, engine, fields, named):
    response = http.post("/v1/messages", json={**ONE, **fields})
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert named in body["error"]["message"]
    assert engine.started == 0


def test_other_failures_are_in_anthropic_s_envelope_too(http, claude):
    def request_body(content, **more):
        return {**ONE, "messages": [{"role": "user", "content": content}], **more}

    assert (
        http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}).json()["error"]["type"]
        == "invalid_request_error"
    )
    assert http.post("/v1/messages", json=request_body("a", model="x")).json()["error"]["type"] == "not_found_error"
    for stream in (False, True):
        full = http.post("/v1/messages", json=request_body("full house", stream=stream))
        assert (full.status_code, full.json()["error"]["type"], full.headers["retry-after"]) == (503, "overloaded_error", "3")
    foreign = http.post("/v1/messages", json=ONE, headers={"x-tenant-id": "a b"})
    assert (foreign.status_code, foreign.json()["type"]) == (400, "error")
    assert http.put("/v1/messages").json()["type"] == "error"
    bug = http.post("/v1/messages", json=request_body("a bug"))
    assert (bug.status_code, bug.json()["error"]["type"]) == (500, "api_error")
    assert "secret" not in bug.text
    with claude.messages.stream(**request_body("boom now")) as stream, pytest.raises(anthropic.APIStatusError, match="no usable answer"):
        list(stream)


def test_documents_of_text_are_text(http, engine):
    blocks = [
        {"type": "document", "title": "T", "context": None, "source": {"type": "text", "media_type": "text/plain", "data": "one"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "two"}]}},
        {"type": "search_result", "title": "S", "source": "url", "content": [{"type": "text", "text": "three"}]},
    ]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": blocks}]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "hot", "input": {}}]}
    for messages in ([{"role": "user", "content": blocks}], [*ONE["messages"], call, result]):
        assert http.post("/v1/messages", json={**ONE, "messages": messages}).status_code == 200
        assert engine.tokenizer.rendered[-1][0][-1]["content"] == "T\none\ntwo\nS\nurl\nthree"
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    for block in (pdf, {"type": "compaction", "content": "a"}, {"type": "container_upload", "file_id": "a"}):
        refused = http.post("/v1/messages", json={**ONE, "messages": [{"role": "user", "content": [block]}]})
        assert refused.status_code == 400
        assert "images, files and other blocks are not supported" in refused.json()["error"]["message"]


def test_the_model_is_told_what_of_a_tools_result_it_cannot_read(http, engine):
    content = [
        {"type": "text", "text": "see"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}},
        {"type": "tool_reference", "tool_name": "hot"},
    ]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}
    assert http.post("/v1/messages", json={**ONE, "messages": [USER, CALLED, result]}).status_code == 200
    told = "see\n[image: this model reads only text]\n[document: this model reads only text]\nhot"
    assert engine.tokenizer.rendered[-1][0][-1]["content"] == told
    content.append({"type": "odd"})
    assert http.post("/v1/messages", json={**ONE, "messages": [USER, CALLED, result]}).status_code == 400


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_the_format_of_an_answer_has_an_older_name(http, engine, field):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    assert http.post("/v1/messages", json={**ONE, field: form if field == "output_format" else {"format": form}}).status_code == 200
    assert json.loads(engine.seen[0].structured_output.text) == form["schema"]


def test_a_strict_tool_has_its_schema_enforced(claude, engine):
    tool = {"name": "hot", "input_schema": {"type": "object", "properties": {"in": {"type": "string"}}, "required": ["in"]}}
    claude.messages.create(**ONE, tools=[tool])
    assert engine.seen[-1].structured_output is None
    claude.messages.create(**ONE, tools=[tool | {"strict": True}])
    assert '"in"' in engine.seen[-1].structured_output.text


def test_tools_and_thinking_of_newer_kinds(http):
    fields = {"tools": [HOT, {"type": "browser_toolset_20260801"}], "thinking": {"type": "between_tools"}}
    response = http.post("/v1/messages", json={**ONE, **fields})
    assert (response.status_code, response.headers["x-chairlift-ignored"]) == (200, "tools.browser_toolset_20260801")
    unnamed = http.post("/v1/messages", json={**ONE, "tools": [{"input_schema": {}}]})
    assert (unnamed.status_code, unnamed.json()["error"]["message"]) == (400, "tools[0].name is missing")


@pytest.mark.parametrize("kind", ["code_execution", "bash_code_execution", "tool_search", "mcp"])
def test_other_tools_of_anthropic_s_servers_are_left_out(http, engine, kind):
    use = {"type": "mcp_tool_use" if kind == "mcp" else "server_tool_use", "id": "s", "name": kind, "input": {}}
    ran = [use, {"type": f"{kind}_tool_result", "tool_use_id": "s", "content": {}}, {"type": "text", "text": "done"}]
    assert http.post("/v1/messages", json={**ONE, "messages": [USER, {"role": "assistant", "content": ran}, USER]}).status_code == 200
    assert engine.tokenizer.rendered[-1][0][1] == {"role": "assistant", "content": "done"}


def test_searches_of_anthropic_s_servers_are_left_out(http, engine):
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "encrypted_content": "y"}]},
        {"type": "text", "text": "found"},
    ]
    messages = [*ONE["messages"], {"role": "assistant", "content": searched}, *ONE["messages"]]
    assert http.post("/v1/messages", json={**ONE, "messages": messages}).status_code == 200
    assert engine.tokenizer.rendered[-1][0][1] == {"role": "assistant", "content": "found"}
