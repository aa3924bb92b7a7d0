"""anthropic-sdk-python, told to validate every answer against its own types, which it does not by itself."""

import asyncio
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0}
"""Older versions have an argument for it."""
WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


class Capital(BaseModel):
    city: Literal["Paris", "Rome", "Berlin"]
    sure: bool


@pytest.fixture(scope="module")
def fast(quick, settings):
    with anthropic.Anthropic(base_url=quick, **settings) as client:
        yield client


@pytest.fixture(scope="module")
def slow(real, settings):
    with anthropic.Anthropic(base_url=real, **settings) as client:
        yield client


def test_a_message(fast, model):
    answer = fast.messages.create(model=model, messages=HELLO, max_tokens=6, system="Be brief.", metadata={"user_id": "ann"})
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", model, "max_tokens")
    [block] = answer.content
    assert (block.type, bool(block.text)) == ("text", True)
    assert answer.usage.output_tokens == 6
    assert answer._request_id


def test_a_stream_says_what_a_message_says(fast, model):
    request = {"model": model, "messages": HELLO, "max_tokens": 30}
    whole = fast.messages.create(**request)
    kinds = [event.type for event in fast.messages.create(**request, stream=True)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    with fast.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 30)


def test_tokens_are_counted_as_they_are_used(fast, model):
    counted = fast.messages.count_tokens(model=model, messages=HELLO, system="Be brief.")
    used = fast.messages.create(model=model, messages=HELLO, system="Be brief.", max_tokens=1).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_a_stop_sequence(fast, model):
    request = {"model": model, "messages": HELLO, "max_tokens": 30}
    text = fast.messages.create(**request).content[0].text
    stop = text[len(text) // 2 :][:3]
    answer = fast.messages.create(**request, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text.partition(stop)[0]


def test_a_conversation_with_blocks(fast, model):
    answer = fast.messages.create(
        model=model,
        max_tokens=3,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "the weather?"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
        ],
        tools=[WEATHER],
        tool_choice={"type": "none"},
        extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
    )
    assert answer.content[0].text


def test_refusals_are_typed(fast, model):
    with pytest.raises(anthropic.BadRequestError) as refused:
        fast.messages.create(model=model, messages=HELLO, max_tokens=-1)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError):
        fast.messages.create(model=model, messages=[{"role": "user", "content": "word " * 2000}], max_tokens=5)
    with pytest.raises(anthropic.NotFoundError) as missing:
        fast.messages.create(model="other", messages=HELLO, max_tokens=5)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError):
        fast.with_options(api_key="wrong").messages.create(model=model, messages=HELLO, max_tokens=5)


def test_models(fast, model):
    assert [listed.id for listed in anthropic.Anthropic(base_url=fast.base_url, api_key=fast.api_key).models.list()] == [model]


def test_many_streams_at_once(quick, settings, model):
    async def one(client, i):
        request = {"model": model, "messages": [{"role": "user", "content": f"Count to {i}."}], "max_tokens": 20}
        async with client.messages.stream(**request) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        return text == (await client.messages.create(**request)).content[0].text

    async def all_of_them():
        async with anthropic.AsyncAnthropic(base_url=quick, **settings) as client:
            return await asyncio.gather(*(one(client, i) for i in range(16)))

    assert all(asyncio.run(all_of_them()))


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_that_must_be_made(slow, model, choice):
    request = {"model": model, "max_tokens": 80, "extra_body": GREEDY, "tools": [WEATHER]}
    request |= {"messages": [{"role": "user", "content": "What is the weather in Paris, in C?"}]}
    request |= {"tool_choice": {**choice, "disable_parallel_tool_use": True}}
    answer = slow.messages.create(**request)
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert (call.name, call.input.keys(), answer.stop_reason) == ("get_weather", {"city", "unit"}, "tool_use")
    with slow.messages.stream(**request) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert [block.input for block in final.content if block.type == "tool_use"] == [call.input]
    assert final.stop_reason == "tool_use"


def test_parse(slow, model):
    question = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
    answer = slow.messages.parse(model=model, messages=question, output_format=Capital, max_tokens=60, extra_body=GREEDY)
    assert isinstance(answer.parsed_output, Capital)
