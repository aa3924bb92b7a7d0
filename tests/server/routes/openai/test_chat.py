import openai
import pytest
from events import events
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter
from scripted_engine import CACHED, answer
from server_here import MODEL

USER = [{"role": "user", "content": "one two three"}]


def test_a_whole_answer_has_openai_s_shape(http, engine):
    engine.shown = CACHED
    body = http.post("/v1/chat/completions", json={"model": MODEL, "messages": USER, "max_tokens": 4}).json()
    answered = TypeAdapter(ChatCompletion).validate_python(body, strict=True)
    assert answered.id.startswith("chatcmpl-")
    assert answered.object == "chat.completion"
    assert answered.model == MODEL
    [choice] = answered.choices
    assert choice.index == 0
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert choice.message.content == answer("one two three", 4)
    assert choice.logprobs is None
    assert answered.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 13,
        "completion_tokens": 4,
        "total_tokens": 17,
    }
    assert answered.usage.prompt_tokens_details.cached_tokens == 3


def test_usage_has_the_tokens_that_speculative_decoding_proposed(http, engine):
    engine.shown = {"timeline": {"draft_tokens": 5, "accepted_draft_tokens": 2}}
    body = {"messages": [{"role": "user", "content": "drafted"}], "max_tokens": 4, "n": 2}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 6}
    [*_, last, _] = events(http.post("/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert last["usage"] == usage


def test_a_stream_has_openai_s_shape(http):
    response = http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 4, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response)
    assert done is None
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk, strict=True)
        assert "usage" not in chunk
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == answer("one two three", 4)


def test_usage_comes_once_and_only_when_asked_for(http):
    request = {"messages": USER, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(http.post("/v1/chat/completions", json=request))
    assert done is None
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["id"] == chunks[0]["id"]


def test_continuous_usage_counts_up(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"messages": USER, "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, _ = events(http.post("/v1/chat/completions", json=request))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 3, 3]


def test_increments_without_text_are_not_sent(http):
    request = {"messages": [{"role": "user", "content": "split me"}], "max_tokens": 4, "stream": True}
    *chunks, _ = events(http.post("/v1/chat/completions", json=request))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "split ", "split ", "me "]


def test_the_openai_client_streams(client):
    stream = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer("one two three", 5)


def test_messages_take_parts_roles_and_tool_turns(client):
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "very"}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "now"},
    ]
    answered = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=4)
    assert answered.choices[0].message.content == "be very brief now "


def test_without_a_limit_the_context_is_the_limit(client, engine):
    answered = client.chat.completions.create(model=MODEL, messages=USER)
    assert answered.usage.total_tokens == engine.info.max_model_len


def test_the_newer_limit_wins(client):
    answered = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=9, max_completion_tokens=2)
    assert answered.usage.completion_tokens == 2


def test_sampling_fields_reach_the_engine(http, engine):
    fields = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    fields |= {"repetition_penalty": 1.25, "ignore_eos": True, "stop_token_ids": [5], "max_tokens": 3}
    assert http.post("/v1/chat/completions", json={"messages": USER, "top_k": -1, "stop": ["x", "y"], **fields}).status_code == 200
    [params] = engine.seen
    given = {name: getattr(params, name) for name in fields}
    assert given == fields | {"stop_token_ids": (5,)}
    assert params.top_k == 0
    assert params.stop == ("x", "y")


def test_null_is_absent(http, engine):
    names = (
        "temperature",
        "top_p",
        "seed",
        "stop",
        "n",
        "logprobs",
        "logit_bias",
        "tools",
        "tool_choice",
        "response_format",
        "stream_options",
    )
    response = http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1, **dict.fromkeys(names)})
    assert response.status_code == 200
    assert engine.seen[0].temperature == 1.0


def test_a_failure_in_mid_stream_is_the_last_event(http, client, engine):
    request = {"messages": [{"role": "user", "content": "boom now"}], "max_tokens": 9, "stream": True}
    reported = events(http.post("/v1/chat/completions", json=request))
    assert reported[-1]["error"]["code"] == "request_failed"
    assert [one["choices"][0]["delta"]["content"] for one in reported[:-1]] == ["", "boom ", "now "]
    stream = client.chat.completions.create(model=MODEL, **request)
    with pytest.raises(openai.APIError, match="no usable answer"):
        list(stream)


def test_a_failure_of_ours_tells_nothing_about_us(http):
    for stream in (False, True):
        request = {"messages": [{"role": "user", "content": "a bug"}], "max_tokens": 9, "stream": stream}
        response = http.post("/v1/chat/completions", json=request)
        assert response.status_code == (200 if stream else 500)
        assert "internal error" in response.text
        assert "0x7f" not in response.text
        assert "secret" not in response.text
    assert http.get("/health").status_code == 200
