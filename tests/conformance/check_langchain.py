"""langchain-openai: chat models over both of OpenAI's chat APIs, and completions."""

import asyncio
import runpy
from pathlib import Path
from typing import Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Capital(BaseModel):
    """A city that is a capital."""

    city: Literal["Paris", "Rome", "Berlin"]
    sure: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
def fast(quick, key, model):
    return {"base_url": f"{quick}/v1", "api_key": key, "model": model, "max_retries": 0, "timeout": 120}


@pytest.fixture
def slow(real, fast):
    return ChatOpenAI(**fast | {"base_url": f"{real}/v1"}, temperature=0, max_tokens=80)


@pytest.mark.parametrize("api", ["chat completions", "responses"])
def test_whole_and_streamed(fast, api):
    chat = ChatOpenAI(**fast, max_tokens=12, stream_usage=True, use_responses_api=api == "responses")
    messages = [SystemMessage("Be brief."), HumanMessage("Say hello.")]
    whole = chat.invoke(messages)
    assert whole.text
    assert whole.usage_metadata["output_tokens"] == 12
    streamed = None
    for chunk in chat.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.text == whole.text
    assert streamed.usage_metadata["output_tokens"] == 12


def test_async_and_batches(fast):
    chat = ChatOpenAI(**fast, max_tokens=12)

    async def streamed():
        return "".join([chunk.text async for chunk in chat.astream("Say hello.")])

    assert {one.text for one in chat.batch(["Say hello."] * 8)} == {asyncio.run(streamed())}


def test_a_conversation_with_calls(fast):
    call = {"name": "get_weather", "args": {"city": "Paris"}, "id": "c1"}
    messages = [HumanMessage("Weather?"), AIMessage("", tool_calls=[call]), ToolMessage("sunny", tool_call_id="c1")]
    assert ChatOpenAI(**fast, max_tokens=4).bind_tools([get_weather], tool_choice="none").invoke(messages).text


def test_completions(fast):
    completion = OpenAI(**fast, max_tokens=12)
    assert completion.invoke("Once upon") == "".join(completion.stream("Once upon"))
    result = completion.generate(["Once", "Twice"])
    assert len(result.generations) == 2
    assert result.llm_output["token_usage"]["completion_tokens"] == 24


def test_errors(fast):
    with pytest.raises(openai.BadRequestError) as refused:
        ChatOpenAI(**fast).invoke("word " * 2000)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(slow, method):
    structured = slow.with_structured_output(Capital, method=method)
    assert isinstance(structured.invoke("What is the capital of France? Answer in JSON."), Capital)


@pytest.mark.parametrize("api", ["chat completions", "responses"])
def test_a_call_that_must_be_made(slow, api):
    chat = slow.model_copy(update={"use_responses_api": api == "responses"})
    chat = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    [call] = chat.invoke("What is the weather in Paris?").tool_calls
    assert (call["name"], call["args"].keys()) == ("get_weather", {"city"})
    assert get_weather.invoke(call).content.startswith("sunny in ")
    streamed = None
    for chunk in chat.stream("What is the weather in Paris?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [one["args"] for one in streamed.tool_calls] == [call["args"]]


def test_logprobs(slow):
    answer = slow.bind(logprobs=True, top_logprobs=2, max_tokens=3).invoke("Say hello.")
    assert [len(token["top_logprobs"]) for token in answer.response_metadata["logprobs"]["content"]] == [2, 2, 2]


def test_the_example(real, key, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{real}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", key)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "langchain_chat.py"))
    assert len(capsys.readouterr().out.splitlines()) >= 3
