"""OpenAI's Agents SDK over chat completions and responses: answers, streams, a tool loop and a typed result."""

import asyncio
from typing import Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]
    sure: bool


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


def run(base, key, model, api, **settings):
    """Makes an agent in an event loop of its own and returns its run."""

    async def go():
        async with AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=300) as client:
            agent = Agent(name="one", model=api(model, client), **settings)
            result = Runner.run_streamed(agent, "What is the weather in Paris?", max_turns=2)
            async for _ in result.stream_events():
                pass
            whole = await Runner.run(agent, "What is the weather in Paris?", max_turns=2)
            return whole.final_output, result.final_output

    return asyncio.run(go())


APIS = pytest.mark.parametrize("api", [OpenAIChatCompletionsModel, OpenAIResponsesModel])


def test_an_answer_whole_and_streamed(quick, key, model):
    # Over responses, the SDK raises for a stream that ends at its maximum length, as these do.
    api = OpenAIChatCompletionsModel
    whole, streamed = run(quick, key, model, api, model_settings=ModelSettings(max_tokens=16, temperature=0))
    assert whole
    assert whole == streamed


@APIS
def test_a_forced_tool_is_called(real, key, model, api):
    settings = ModelSettings(max_tokens=64, temperature=0, tool_choice="get_weather")
    stop = StopAtTools(stop_at_tool_names=["get_weather"])
    whole, streamed = run(real, key, model, api, tools=[get_weather], tool_use_behavior=stop, model_settings=settings)
    assert whole in ("sunny in Paris", "sunny in Rome")
    assert whole == streamed


@APIS
def test_a_typed_result(real, key, model, api):
    whole, _ = run(real, key, model, api, output_type=Capital, model_settings=ModelSettings(max_tokens=64, temperature=0))
    assert isinstance(whole, Capital)
