"""openai-python, told to validate every answer against its own types, which it does not by itself."""

import asyncio
import json
import time
from typing import Literal

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter

HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris, in C?"}]


class Capital(BaseModel):
    city: Literal["Paris", "Rome", "Berlin"]
    sure: bool


@pytest.fixture(scope="module")
def fast(quick, settings):
    with openai.OpenAI(base_url=f"{quick}/v1", **settings) as client:
        yield client


@pytest.fixture(scope="module")
def slow(real, settings):
    with openai.OpenAI(base_url=f"{real}/v1", **settings) as client:
        yield client


def lenient(client):
    """The same client without validation, where OpenAI's types forbid the null that OpenAI's server sends: a completion's

    `finish_reason` before its end, and the first token's log-probability.
    """
    return openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0, timeout=120)


@pytest.fixture
def several(quick, settings):
    return lambda: openai.AsyncOpenAI(base_url=f"{quick}/v1", **settings)


def reported(chunks, index=0):
    """The text that a chat's chunks carry for one choice."""
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


# Shapes, from the server without weights.


def test_models(fast, model):
    [listed] = fast.models.list().data
    assert listed.id == model
    assert fast.models.retrieve(model) == listed
    with pytest.raises(openai.NotFoundError):
        fast.models.retrieve("no/such-model")


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_chat(fast, model, limit):
    answer = fast.chat.completions.create(model=model, messages=HELLO, **{limit: 7})
    assert (answer.object, answer.model, len(answer.choices)) == ("chat.completion", model, 1)
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role, choice.message.tool_calls) == (0, "length", "assistant", None)
    assert choice.message.content
    usage = answer.usage
    assert (usage.completion_tokens, usage.total_tokens) == (7, usage.prompt_tokens + 7)
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert answer._request_id


def test_a_chat_streams_what_it_answers_whole(fast, model):
    request = {"model": model, "messages": HELLO, "max_tokens": 40}
    whole = fast.chat.completions.create(**request)
    chunks = list(fast.chat.completions.create(**request, stream=True))
    assert reported(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_in_a_chunk_of_its_own_if_asked_for(fast, model):
    chunks = list(
        fast.chat.completions.create(model=model, messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True})
    )
    *others, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == 5
    assert all(chunk.choices and chunk.usage is None for chunk in others)


def test_usage_may_come_with_every_chunk(fast, model):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(fast.chat.completions.create(model=model, messages=HELLO, max_tokens=5, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert (counts, counts[-1]) == (sorted(counts), 5)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(fast, model, stream):
    request = {"model": model, "messages": HELLO, "max_tokens": 5, "n": 3, "stream": stream}
    if stream:
        chunks = list(fast.chat.completions.create(**request, stream_options={"include_usage": True}))
        ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
        assert sorted(ends) == [0, 1, 2]
        assert chunks[-1].usage.completion_tokens == 15
    else:
        answer = fast.chat.completions.create(**request)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 15


def test_the_stream_helper(fast, model):
    request = {"model": model, "messages": HELLO, "max_tokens": 30}
    text = fast.chat.completions.create(**request).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    with fast.chat.completions.stream(**request, stop=stop) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert (final.finish_reason, final.message.content) == ("stop", text.partition(stop)[0])


def test_fields_that_clients_send_by_habit(fast, model):
    answer = fast.chat.completions.create(
        model=model,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is the"}, {"type": "text", "text": "weather?"}], "name": "ann"},
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "user", "content": "Thanks"},
        ],
        max_completion_tokens=4,
        user="ann",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        tools=[WEATHER],
        tool_choice="none",
        parallel_tool_calls=True,
        logprobs=None,
        stop=None,
        temperature=0,
        top_p=1,
        presence_penalty=0,
        frequency_penalty=0,
        seed=1,
        logit_bias=None,
        response_format={"type": "text"},
        reasoning_effort="low",
        prompt_cache_key="k",
        safety_identifier="s",
        verbosity="low",
    )
    assert answer.choices[0].message.content
    assert answer.service_tier == "default"


@pytest.mark.parametrize(("prompt", "choices"), [("Once", 1), (["Once", "Twice"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)])
def test_completions(fast, model, prompt, choices):
    answer = fast.completions.create(model=model, prompt=prompt)
    assert [choice.index for choice in answer.choices] == list(range(choices))
    assert answer.usage.completion_tokens == 16 * choices
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    chunks = list(lenient(fast).completions.create(model=model, prompt=prompt, stream=True, stream_options={"include_usage": True}))
    for choice in answer.choices:
        assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == choice.index) == choice.text
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 16 * choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_may_begin_with_its_prompt(fast, model, stream):
    answer = lenient(fast).completions.create(model=model, prompt="Once upon", echo=True, max_tokens=3, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    assert text.startswith("Once upon")
    assert len(text) > len("Once upon")


def test_raw_and_streamed_responses(fast, model):
    raw = fast.chat.completions.with_raw_response.create(model=model, messages=HELLO, max_tokens=2)
    assert raw.headers["content-type"].startswith("application/json")
    TypeAdapter(ChatCompletion).validate_python(json.loads(raw.text))
    with fast.chat.completions.with_streaming_response.create(model=model, messages=HELLO, max_tokens=2, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for line in lines:
        TypeAdapter(ChatCompletionChunk).validate_json(line)
    raw = fast.completions.with_raw_response.create(model=model, prompt="a", max_tokens=2)
    TypeAdapter(Completion).validate_python(json.loads(raw.text))
    TypeAdapter(Model).validate_python(json.loads(fast.models.with_raw_response.retrieve(model).text))


def test_refusals_are_typed(fast, model, quick):
    with pytest.raises(openai.BadRequestError) as refused:
        fast.chat.completions.create(model=model, messages=HELLO, temperature=-1)
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "temperature")
    assert refused.value.request_id
    with pytest.raises(openai.BadRequestError) as refused:
        fast.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 2000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        fast.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as stranger:
        fast.with_options(api_key="wrong").models.list()
    assert stranger.value.code == "invalid_api_key"


def test_embeddings(slow, model):
    answer = slow.embeddings.create(model=model, input=["a", "b"], dimensions=8, encoding_format="float")
    assert [len(one.embedding) for one in answer.data] == [8, 8]
    # By default the client asks for base64, which its own types forbid until it is decoded.
    decoded = lenient(slow).embeddings.create(model=model, input=["a", "b"], dimensions=8)
    assert decoded.data == answer.data
    assert answer.usage.prompt_tokens >= 2
    with pytest.raises(openai.BadRequestError, match="dimensions must be"):
        slow.embeddings.create(model=model, input="a", dimensions=10**6)


def test_responses(fast, model):
    answer = fast.responses.create(model=model, input="Say hello.", instructions="Be brief.", max_output_tokens=6)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text
    assert answer.usage.output_tokens == 6
    raw = fast.responses.with_raw_response.create(model=model, input=[{"role": "user", "content": "Hello"}], max_output_tokens=2)
    TypeAdapter(Response).validate_python(json.loads(raw.text))


def test_responses_stream(fast, model):
    request = {"model": model, "input": "Say hello.", "max_output_tokens": 6}
    events = list(fast.responses.create(**request, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == fast.responses.create(**request).output_text == events[-1].response.output_text


def test_many_streams_at_once(several, model):
    async def one(client, i):
        request = {"model": model, "messages": [{"role": "user", "content": f"Count to {i}."}], "max_tokens": 20}
        chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]
        whole = await client.chat.completions.create(**request)
        return reported(chunks) == whole.choices[0].message.content

    async def all_of_them():
        async with several() as client:
            return await asyncio.gather(*(one(client, i) for i in range(32)))

    assert all(asyncio.run(all_of_them()))


def test_leaving_a_stream(several, model):
    async def leave():
        async with several() as client:
            for _ in range(5):
                stream = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=400, stream=True)
                async for _ in stream:
                    break
                await stream.close()
            async with client.chat.completions.stream(model=model, messages=HELLO, max_tokens=3) as stream:
                return [event async for event in stream]

    assert asyncio.run(leave())


# What needs a model.


def test_chat_logprobs(slow, model):
    answer = slow.chat.completions.create(model=model, messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
    [choice] = answer.choices
    assert len(choice.logprobs.content) == 5
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy
        assert token.token == token.top_logprobs[0].token
    assert bytes(b for token in choice.logprobs.content for b in token.bytes).decode().startswith(choice.message.content)
    chunks = slow.chat.completions.create(
        model=model, messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3, stream=True
    )
    streamed = [token.token for chunk in chunks for c in chunk.choices if c.logprobs for token in c.logprobs.content]
    assert streamed == [token.token for token in choice.logprobs.content]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_completion_logprobs_of_a_prompt(slow, model, max_tokens):
    prompt = "The capital of France is"
    request = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    [choice] = lenient(slow).completions.create(model=model, **request).choices
    columns = choice.logprobs
    assert columns.token_logprobs[0] is None
    assert all(value <= 0 for value in columns.token_logprobs[1:])
    assert "".join(columns.tokens) == choice.text
    assert choice.text.startswith(prompt)
    assert all(choice.text[at:].startswith(token) for at, token in zip(columns.text_offset, columns.tokens, strict=True))
    assert len(columns.tokens) == len(columns.top_logprobs) == len(columns.text_offset) == 5 + max_tokens


def test_a_stop_string_is_never_shown(slow, model):
    request = {"model": model, "prompt": "1, 2, 3, 4,", "max_tokens": 24, "temperature": 0, "stop": [" 8,", "\n\n\n"]}
    whole = slow.completions.create(**request).choices[0]
    assert (whole.finish_reason, " 8" in whole.text) == ("stop", False)
    chunks = list(lenient(slow).completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


def test_parse(slow, model):
    question = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
    answer = slow.chat.completions.parse(model=model, messages=question, response_format=Capital, max_tokens=60, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Capital)
    with slow.chat.completions.stream(model=model, messages=question, response_format=Capital, max_tokens=60, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_json_object(slow, model):
    answer = slow.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Give a JSON object with the key ok and the value true."}],
        response_format={"type": "json_object"},
        max_tokens=60,
        temperature=0,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_be_made(slow, model, choice):
    request = {"model": model, "messages": ASK_WEATHER, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    request |= {"max_tokens": 80, "temperature": 0}
    answer = slow.chat.completions.create(**request).choices[0]
    [call] = answer.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments).keys() == {"city", "unit"}
    # OpenAI ends a call that was named with "stop".
    assert answer.finish_reason in ({"tool_calls"} if choice == "required" else {"tool_calls", "stop"})
    chunks = list(slow.chat.completions.create(**request, stream=True))
    deltas = [delta for chunk in chunks for c in chunk.choices for delta in c.delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert [bool(delta.id and delta.function.name and delta.type) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [answer.finish_reason]


class get_weather(BaseModel):  # noqa: N801  (its name is the function's)
    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


def test_parsed_calls(slow, model):
    request = {"model": model, "messages": ASK_WEATHER, "tools": [openai.pydantic_function_tool(get_weather)], "tool_choice": "required"}
    request |= {"max_tokens": 80, "temperature": 0, "parallel_tool_calls": False}
    [call] = slow.chat.completions.parse(**request).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, get_weather)
    with slow.chat.completions.stream(**request) as stream:
        kinds = {event.type for event in stream}
        [again] = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert again.function.parsed_arguments == call.function.parsed_arguments


def test_the_responses_stream_helper(slow, model):
    with slow.responses.stream(model=model, input="Say only the word hello.", max_output_tokens=200, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (final.status, final.output_text) == ("completed", text)


def test_responses_parse(slow, model):
    answer = slow.responses.parse(
        model=model, input="What is the capital of France? Answer in JSON.", text_format=Capital, max_output_tokens=60, temperature=0
    )
    assert isinstance(answer.output_parsed, Capital)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_calls(slow, model, stream):
    tool = {"type": "function", **WEATHER["function"], "strict": True}
    request = {"model": model, "input": "What is the weather in Paris, in C?", "tools": [tool], "tool_choice": "required"}
    request |= {"max_output_tokens": 80, "temperature": 0, "parallel_tool_calls": False}
    if stream:
        with slow.responses.stream(**request) as events:
            kinds = {event.type for event in events}
            answer = events.get_final_response()
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    else:
        answer = slow.responses.create(**request)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert json.loads(call.arguments).keys() == {"city", "unit"}
    answered = slow.responses.create(
        model=model,
        input=[
            {"role": "user", "content": "What is the weather?"},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
        max_output_tokens=5,
    )
    assert answered.error is None
    assert answered.output


def test_files_and_batches(fast, model):
    def line(name, **fields):
        body = {"model": model, "messages": HELLO, "max_tokens": 8, **fields}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})

    lines = [*(line(str(number)) for number in range(100)), line("bad", max_tokens=-1)]
    file = fast.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
    assert fast.files.wait_for_processing(file.id).bytes == len("\n".join(lines))
    batch = fast.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "conformance"}
    )
    for _ in range(600):
        if (batch := fast.batches.retrieve(batch.id)).status == "completed":
            break
        time.sleep(0.2)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 100, 1)
    answers = [json.loads(text) for text in fast.files.content(batch.output_file_id).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(100)]
    for answer in answers:
        TypeAdapter(ChatCompletion).validate_python(answer["response"]["body"])
    [error] = [json.loads(text) for text in fast.files.content(batch.error_file_id).iter_lines()]
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert batch.id in [one.id for one in fast.batches.list(limit=1)]
    assert {one.purpose for one in fast.files.list()} == {"batch", "batch_output"}
    with pytest.raises(openai.ConflictError):
        fast.batches.cancel(batch.id)
    for id in (file.id, batch.output_file_id, batch.error_file_id):
        assert fast.files.delete(id).deleted
    with pytest.raises(openai.NotFoundError):
        fast.files.retrieve(file.id)
