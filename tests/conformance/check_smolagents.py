"""smolagents: its OpenAI model, whole and streamed, with a required tool."""

from smolagents import OpenAIModel, tool


@tool
def get_weather(city: str) -> str:
    """Tells the weather of a city.

    Args:
        city: where
    """
    return f"sunny in {city}"


ASK = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}]


def made(base, key, model):
    return OpenAIModel(model_id=model, api_base=f"{base}/v1", api_key=key, temperature=0, max_tokens=64)


def test_an_answer_whole_and_streamed(quick, key, model):
    one = made(quick, key, model)
    whole = one.generate(ASK)
    parts = list(one.generate_stream(ASK))
    assert "".join(part.content or "" for part in parts) == whole.content
    assert whole.token_usage.output_tokens == 64


def test_a_required_tool(real, key, model):
    answer = made(real, key, model).generate(ASK, tools_to_call_from=[get_weather])
    assert answer.tool_calls[0].function.name == "get_weather"
