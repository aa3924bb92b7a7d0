"""litellm, which maps every provider's API and errors to its own: ours as OpenAI's, Anthropic's and Ollama's."""

import asyncio
import json
import os

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one as it is imported

import litellm

HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def fast(quick, key, model):
    return {"model": f"openai/{model}", "api_base": f"{quick}/v1", "api_key": key, "num_retries": 0, "timeout": 120}


@pytest.fixture(scope="module")
def slow(real, fast):
    return fast | {"api_base": f"{real}/v1"}


@pytest.fixture(scope="module", params=["openai", "hosted_vllm", "anthropic"])
def provider(request, quick, key, model):
    base = quick if request.param == "anthropic" else f"{quick}/v1"
    return {"model": f"{request.param}/{model}", "api_base": base, "api_key": key, "num_retries": 0, "timeout": 120}


def test_whole_and_streamed(provider):
    request = provider | {"messages": HELLO, "max_tokens": 20}
    whole = litellm.completion(**request)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 20
    chunks = list(litellm.completion(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == 20


def test_async(provider):
    async def several():
        answers = [litellm.acompletion(**provider, messages=HELLO, max_tokens=10) for _ in range(8)]
        whole = await asyncio.gather(*answers)
        stream = await litellm.acompletion(**provider, messages=HELLO, max_tokens=10, stream=True)
        return {one.choices[0].message.content for one in whole}, "".join([c.choices[0].delta.content or "" async for c in stream])

    whole, streamed = asyncio.run(several())
    assert whole == {streamed}


def test_async_ollama(quick, key, model):
    async def answers():
        request = {"model": f"ollama_chat/{model}", "api_base": quick, "api_key": key, "messages": HELLO, "max_tokens": 10}
        whole = await litellm.acompletion(**request)
        stream = await litellm.acompletion(**request, stream=True)
        return whole.choices[0].message.content, "".join([c.choices[0].delta.content or "" async for c in stream])

    whole, streamed = asyncio.run(answers())
    assert whole == streamed != ""


def test_text_completion(fast, model):
    request = fast | {"model": f"text-completion-openai/{model}", "prompt": "Once upon", "max_tokens": 8}
    whole = litellm.text_completion(**request)
    assert whole.usage.completion_tokens == 8
    streamed = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**request, stream=True))
    assert streamed == whole.choices[0].text


def test_errors_are_told_apart(fast):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**fast, messages=[{"role": "user", "content": "word " * 2000}])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**fast | {"model": "openai/other"}, messages=HELLO)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**fast | {"api_key": "wrong"}, messages=HELLO)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**fast, messages=HELLO, temperature=-1)


def test_responses(fast):
    answer = litellm.responses(**fast, input="Say hello.", max_output_tokens=20)
    assert answer.usage.output_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_made(slow, stream):
    request = slow | {"messages": [{"role": "user", "content": "Weather in Paris?"}], "tools": [TOOL], "tool_choice": "required"}
    request |= {"max_tokens": 60, "temperature": 0, "parallel_tool_calls": False, "stream": stream}
    answer = litellm.completion(**request)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=request["messages"])
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_json_schema(slow):
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = litellm.completion(**slow, messages=HELLO, response_format=wanted, max_tokens=30, temperature=0)
    assert json.loads(answer.choices[0].message.content).keys() == {"sure"}


def test_logprobs(slow):
    answer = litellm.completion(**slow, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2)
    assert [len(token.top_logprobs) for token in answer.choices[0].logprobs.content] == [2, 2, 2]
