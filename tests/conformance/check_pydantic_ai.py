"""pydantic-ai: answers, streams, a tool and typed results, over chat completions and responses."""

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "What is the capital of France?"
APIS = pytest.mark.parametrize("api", [OpenAIChatModel, OpenAIResponsesModel])


class Capital(BaseModel):
    city: Literal["Paris", "Rome"]
    sure: bool


def agent(base, key, model, api, **settings):
    made = api(model, provider=OpenAIProvider(base_url=f"{base}/v1", api_key=key))
    return Agent(made, model_settings={"temperature": 0, "max_tokens": 64}, retries=0, **settings)


@APIS
def test_an_answer_whole_and_streamed(quick, key, model, api):
    async def go():
        one = agent(quick, key, model, api)
        whole = await one.run("Say hello.")
        async with one.run_stream("Say hello.") as stream:
            return whole, await stream.get_output(), stream.usage

    whole, streamed, _ = asyncio.run(go())
    assert whole.output
    assert whole.output == streamed


@APIS
@pytest.mark.parametrize("output", [ToolOutput, NativeOutput])
def test_a_typed_result(real, key, model, api, output):
    result = asyncio.run(agent(real, key, model, api, output_type=output(Capital)).run(ASK))
    assert isinstance(result.output, Capital)
