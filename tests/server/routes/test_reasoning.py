"""Reasoning over HTTP: the fields, items and blocks of each API, and what a client sends back."""

import anthropic
import pytest
from events import objects
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server_here import MODEL

from chairlift.chat.reasoning import ReasoningTokens
from chairlift.chat_template import ChatTemplate
from chairlift.server.routes.openai.response_request import ResponsesRequest

pytestmark = pytest.mark.shared_server

TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour"
CALLED = '<think>I look.</think><tool_call>{"name": "get_time", "arguments": {}}</tool_call> '
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.fixture
def engine(engine):
    engine.tokenizer.template = ChatTemplate({"default": "{{ messages }}{{ tools }}<tool_call></think>"}, {})
    return engine


@pytest.fixture
def claude(base):
    with anthropic.Anthropic(base_url=base, api_key="any", max_retries=0, timeout=30) as client:
        yield client


def request_body(text, **fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": f"SAY:{text}"}], **fields}


def streamed(client, **fields):
    """Reasoning and content of a stream, by what its deltas hold."""
    reasoning, content = "", ""
    for chunk in client.chat.completions.create(**fields, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        extra = delta.model_extra
        assert extra.get("reasoning") == extra.get("reasoning_content")
        reasoning += extra.get("reasoning", "")
    return reasoning, content


def test_reasoning_has_its_own_fields(client):
    message = client.chat.completions.create(**request_body(THOUGHT)).choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Four", "Two and two.", "Two and two.")
    assert streamed(client, **request_body(THOUGHT)) == ("Two and two.", "Four")
    assert streamed(client, **request_body(THOUGHT, logprobs=True)) == ("Two and two.", "Four")
    plain = client.chat.completions.create(**request_body("Four")).choices[0].message
    assert (plain.content, plain.reasoning_content) == ("Four", None)


def test_a_call_may_end_an_answer_whose_reasoning_has_no_end(client):
    call = CALLED.partition("</think>")[2].strip()
    for text, calls, finish in (
        (f"<think>I need {call}\nI look.\n{call}{call}\n", 2, "tool_calls"),
        (f"<think>I need {call} now.", 0, "stop"),
        ("<think>I look.", 0, "stop"),
    ):
        choice = client.chat.completions.create(**request_body(text, tools=[TIME])).choices[0]
        assert (len(choice.message.tool_calls or ()), choice.finish_reason, choice.message.content or "") == (calls, finish, "")
        assert choice.message.reasoning == text.removeprefix("<think>").strip()
        with client.chat.completions.stream(**request_body(text, tools=[TIME])) as stream:
            assert len(stream.get_final_completion().choices[0].message.tool_calls or ()) == calls
    cut = client.chat.completions.create(**request_body(f"<think>{call} x", tools=[TIME], max_tokens=4)).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)


def test_a_model_that_does_not_reason_has_no_such_fields(client, engine):
    engine.tokenizer.template = ChatTemplate({"default": "{{ messages }}"}, {})
    answer = client.chat.completions.create(**request_body(THOUGHT))
    assert answer.choices[0].message.content == THOUGHT
    assert "reasoning" not in answer.choices[0].message.model_extra
    assert answer.usage.completion_tokens_details is None


def test_the_operator_may_choose_the_parser(client, server, monkeypatch):
    monkeypatch.setattr(server[1].default, "reasoning_parser", "none")
    assert client.chat.completions.create(**request_body(THOUGHT)).choices[0].message.content == THOUGHT
    monkeypatch.setattr(server[1].default, "reasoning_parser", "mistral")
    message = client.chat.completions.create(**request_body("[THINK]a[/THINK]b")).choices[0].message
    assert (message.reasoning, message.content) == ("a", "b")


def test_a_template_may_open_the_tag_in_the_prompt(client, engine):
    engine.tokenizer.decode = lambda ids, **_: "<|im_start|>assistant\n<think>\n"
    message = client.chat.completions.create(**request_body("Two.</think>Four")).choices[0].message
    assert (message.reasoning, message.content) == ("Two.", "Four")
    cut = client.chat.completions.create(**request_body("Two and two</th", max_tokens=2))
    assert (cut.choices[0].message.reasoning, cut.choices[0].message.content) == ("Two an", "")
    assert cut.choices[0].finish_reason == "length"


def test_tags_of_the_user_are_text(client):
    messages = [{"role": "user", "content": "What is <think>?</think> SAY:A tag"}]
    message = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message
    assert (message.reasoning, message.content) == (None, "A tag")


def test_reasoning_is_left_out_if_the_client_wishes(client):
    message = client.chat.completions.create(**request_body(THOUGHT, extra_body={"include_reasoning": False})).choices[0].message
    assert message.content == "Four"
    assert "reasoning" not in message.model_extra


def test_calls_follow_reasoning(client):
    choice = client.chat.completions.create(**request_body(CALLED, tools=[TIME])).choices[0]
    assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == ("I look.", None, "tool_calls")
    assert [call.function.name for call in choice.message.tool_calls] == ["get_time"]
    mentioned = CALLED.replace("I look.", '<tool_call>{"name": "get_time"}</tool_call>')
    choice = client.chat.completions.create(**request_body(mentioned, tools=[TIME])).choices[0]
    assert choice.message.reasoning == '<tool_call>{"name": "get_time"}</tool_call>'
    assert len(choice.message.tool_calls) == 1


GPT_OSS = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"


def test_gpt_oss_writes_channels(client, engine):
    engine.tokenizer.template = ChatTemplate({"default": "<|channel|>commentary<|message|>{{ tools }}{{ messages }}"}, {})
    message = client.chat.completions.create(**request_body(f"{GPT_OSS}<|channel|>final<|message|>Noon.")).choices[0].message
    assert (message.reasoning, message.content) == ("I look.", "Noon.")
    call = "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}"
    choice = client.chat.completions.create(**request_body(f"{GPT_OSS}{call}", tools=[TIME])).choices[0]
    assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == ("I look.", None, "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == "{}"
    client.chat.completions.create(**request_body("x", response_format=SCHEMA))
    assert engine.seen[-1].structured_output.before.splitlines()[0].endswith('"<|channel|>final<|message|>" @answer')
    client.chat.completions.create(**request_body("x", tools=[TIME], tool_choice="required"))
    assert engine.seen[-1].structured_output.before.splitlines()[0].endswith("space)? @answer")
    strict = {"type": "function", "function": {**TIME["function"], "strict": True}}
    response = client.chat.completions.with_raw_response.create(**request_body("x", tools=[strict]))
    assert response.headers["x-chairlift-ignored"] == "tools.get_time.strict"


def test_control_tokens_that_mark_reasoning_reach_the_parser(client, engine):
    engine.tokenizer.control_texts = ("<think>", "</think>", "EOS")  # the engine sends three characters at a time
    message = client.chat.completions.create(**request_body("<think>abEOS</think>bEOS")).choices[0].message
    assert (message.reasoning, message.content) == ("ab", "b")
    assert not engine.seen[-1].skip_special_tokens


def test_the_tokens_of_reasoning_are_counted(client, http, monkeypatch):
    monkeypatch.setattr(ReasoningTokens, "count", lambda self, tokens: len(tokens))
    usage = client.chat.completions.create(**request_body("<think>abc", n=2)).usage
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens == 10
    body = {"model": MODEL, "input": "SAY:<think>abc"}
    assert http.post("/v1/responses", json=body).json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    message = http.post("/v1/messages", json=request_body("<think>abc", max_tokens=9)).json()
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 5}


def test_a_schema_begins_after_the_reasoning(client, engine):
    client.chat.completions.create(**request_body("x", response_format=SCHEMA))
    structure = engine.seen[-1].structured_output
    assert structure.kind == "json"
    assert structure.before.startswith('start: ("<think>" reasoning')
    engine.tokenizer.decode = lambda ids, **_: "assistant\n<think>"
    client.chat.completions.create(**request_body("x", response_format=SCHEMA))
    assert engine.seen[-1].structured_output.before.startswith("start: reasoning")
    client.chat.completions.create(**request_body("x", tools=[TIME], tool_choice="required"))
    assert engine.seen[-1].structured_output.before.startswith("start: reasoning")
    engine.tokenizer.decode = lambda ids, **_: "assistant\n<think></think>"
    client.chat.completions.create(**request_body("x", response_format=SCHEMA))
    assert engine.seen[-1].structured_output.before == ""


def test_a_budget_reaches_the_engine_with_the_marks(client, engine):
    ask = request_body("x", extra_body={"thinking_token_budget": 7})
    response = client.chat.completions.with_raw_response.create(**ask)
    assert "x-chairlift-ignored" not in response.headers
    assert engine.seen[-1].structured_output.budget == (7, "<think>", "</think>", tuple(b"</think>"), "")
    engine.tokenizer.decode = lambda ids, **_: "assistant\n<think>"
    client.chat.completions.create(**ask, response_format=SCHEMA)
    assert engine.seen[-1].structured_output.budget.start == ""
    client.chat.completions.create(**request_body("x", extra_body={"thinking": {"type": "enabled", "budget_tokens": 8}}))
    assert engine.seen[-1].structured_output.budget.tokens == 8
    client.chat.completions.create(**request_body("x", extra_body={"thinking_token_budget": -1}))
    assert engine.seen[-1].structured_output is None
    engine.tokenizer.decode = lambda ids, **_: "assistant\n<think></think>"
    assert client.chat.completions.with_raw_response.create(**ask).headers["x-chairlift-ignored"] == "thinking_token_budget"
    assert engine.seen[-1].structured_output is None


def test_a_budget_of_gpt_oss_forces_the_answer_or_a_call(client, engine):
    engine.tokenizer.template = ChatTemplate({"default": "<|channel|>commentary<|message|>{{ tools }}{{ messages }}"}, {})
    ask = request_body("x", extra_body={"thinking_token_budget": 7})
    client.chat.completions.create(**ask)
    budget = engine.seen[-1].structured_output.budget
    assert bytes(budget.end_tokens) == b"<|end|><|start|>assistant<|channel|>final<|message|>"
    assert budget.again == "<|start|>assistant<|channel|>analysis<|message|>"
    client.chat.completions.create(**ask, tools=[TIME])
    assert bytes(engine.seen[-1].structured_output.budget.end_tokens) == b"<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "high", "enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_the_template_is_told_whether_to_reason(http, engine, fields, variables):
    assert http.post("/v1/chat/completions", json=request_body("x", **fields)).status_code == 200
    assert engine.tokenizer.rendered[-1][1] == variables


def test_unknown_efforts_are_refused(http):
    error = http.post("/v1/chat/completions", json=request_body("x", reasoning_effort="immense")).json()["error"]
    assert error["param"] == "reasoning_effort"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_that_clients_send_back_reaches_the_template(http, engine, name):
    messages = [{"role": "assistant", "content": "Four", name: "Two and two."}, {"role": "user", "content": "x"}]
    assert http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).status_code == 200
    said = engine.tokenizer.rendered[-1][0][0]
    assert said == {"role": "assistant", "content": "Four", **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Two and two.")}


def test_responses_have_reasoning_items(client, http):
    fields = {"model": MODEL, "input": f"SAY:{CALLED}", "tools": [{"type": "function", "name": "get_time"}]}
    answer = client.responses.create(**fields)
    TypeAdapter(Response).validate_python(answer.model_dump(exclude_unset=True), strict=False)
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    assert answer.output[0].content[0].text == "I look."
    adapter = TypeAdapter(ResponseStreamEvent)
    events = objects(http.post("/v1/responses", json=fields | {"stream": True}).text)
    for event in events:
        adapter.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("reasoning_text.delta")
    assert deltas > 1
    assert kinds[: 6 + deltas] == [
        *("created", "in_progress", "output_item.added", "content_part.added", *["reasoning_text.delta"] * deltas),
        *("reasoning_text.done", "content_part.done"),
    ]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "function_call"]
    assert "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta") == "I look."


def test_reasoning_items_that_clients_send_back_belong_to_what_follows():
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Two."}]}
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "y"}
    said = {"role": "assistant", "content": "Four"}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Sum."}], "encrypted_content": "x"}
    request, _ = ResponsesRequest.read({"input": [thought, call, result, summary, said, thought]})
    first, second, third = request.chat().conversation()
    assert (first["reasoning_content"], first["tool_calls"][0]["id"]) == ("Two.", "a")
    assert second["role"] == "tool"
    assert (third["reasoning_content"], third["content"]) == ("Sum.", "Four")


def test_the_effort_of_responses_reaches_the_template(http, engine):
    body = {"model": MODEL, "input": "SAY:x", "reasoning": {"effort": "low", "summary": "auto"}}
    assert http.post("/v1/responses", json=body).json()["reasoning"] == {"effort": "low", "summary": None}
    assert engine.tokenizer.rendered[-1][1]["reasoning_effort"] == "low"
    error = http.post("/v1/responses", json=body | {"reasoning": {"effort": "x"}}).json()["error"]
    assert error["param"] == "reasoning.effort"


def test_messages_have_thinking_blocks(claude):
    fields = {**request_body(CALLED), "max_tokens": 200, "tools": [{"name": "get_time", "input_schema": {"type": "object"}}]}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert "thinking" in kinds
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        assert message.content[0].thinking == "I look."
        assert message.stop_reason == "tool_use"


def test_a_message_that_is_cut_off_in_its_reasoning_has_no_text(claude):
    message = claude.messages.create(**request_body("<think>on and on"), max_tokens=4)
    assert [block.type for block in message.content] == ["thinking"]
    assert message.stop_reason == "max_tokens"


def test_thinking_of_messages_is_switched_and_sent_back(claude, engine):
    thinking = {"type": "thinking", "thinking": "Two.", "signature": ""}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "Four"}]},
        {"role": "user", "content": "y"},
    ]
    ask = {"model": MODEL, "max_tokens": 1, "messages": messages}
    claude.messages.create(**ask, thinking={"type": "enabled", "budget_tokens": 1024})
    conversation, variables = engine.tokenizer.rendered[-1]
    assert (conversation[1]["reasoning_content"], conversation[1]["content"]) == ("Two.", "Four")
    assert variables == {"enable_thinking": True, "thinking": True}
    assert engine.seen[-1].structured_output.budget.tokens == 1024
    claude.messages.create(**ask, thinking={"type": "disabled"})
    assert engine.tokenizer.rendered[-1][1] == {"enable_thinking": False, "thinking": False}
    assert engine.seen[-1].structured_output is None


def test_a_failed_tool_says_so(claude, engine):
    def answer(**result):
        block = {"type": "tool_result", "tool_use_id": "a", **result}
        call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]}, {"role": "user", "content": [block]}]
        claude.messages.create(model=MODEL, max_tokens=1, messages=messages)
        return engine.tokenizer.rendered[-1][0][-1]["content"]

    assert answer(content="no such file", is_error=True).strip().endswith("Error: no such file")
    assert answer(is_error=True).endswith("Error")
    assert answer(content="all is well", is_error=False).endswith("all is well")
