"""ollama-python: chats, prompts, structured output and tools of the default model."""

import ollama
import pytest
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Say hello."}]
SHORT = {"temperature": 0, "num_predict": 8}


class Capital(BaseModel):
    city: str
    sure: bool


@pytest.fixture(scope="module")
def fast(quick, key):
    return ollama.Client(quick, headers={"Authorization": f"Bearer {key}"}, timeout=120)


@pytest.fixture(scope="module")
def slow(real, key):
    return ollama.Client(real, headers={"Authorization": f"Bearer {key}"}, timeout=120)


def get_weather(city: str) -> str:
    """Tells the weather of a city.

    Args:
        city: where
    """
    return city


def test_the_model_is_listed_and_described(fast, model):
    [listed], [running], shown = fast.list().models, fast.ps().models, fast.show(model)
    assert listed.model == running.model == model
    assert listed.size > 0 < running.size
    assert listed.digest == running.digest != ""
    assert listed.details == running.details == shown.details
    family = shown.modelinfo["general.architecture"]
    assert (shown.details.family, shown.modelinfo[f"{family}.context_length"]) == (family, 512)
    assert "tools" in shown.capabilities


def test_a_chat_and_a_stream_say_the_same(fast, model):
    whole = fast.chat(model, HELLO, options=SHORT)
    parts = list(fast.chat(model, HELLO, options=SHORT, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (whole.done_reason, whole.eval_count, parts[-1].eval_count) == ("length", 8, 8)


def test_a_prompt(fast, model):
    assert fast.generate(model, "Hello", system="Be brief.", options=SHORT).eval_count == 8
    raw = fast.generate(model, "Hello", raw=True, options=SHORT, keep_alive="5m0s")
    assert raw.prompt_eval_count < 5


def test_a_schema(slow, model):
    prompt = [{"role": "user", "content": "What is the capital of France? Answer as JSON with city and sure."}]
    answer = slow.chat(model, prompt, format=Capital.model_json_schema(), options={"temperature": 0, "num_predict": 100})
    assert Capital.model_validate_json(answer.message.content)


def test_tools_and_their_results(slow, model):
    answer = slow.chat(model, [{"role": "user", "content": "What is the weather in Rome?"}], tools=[get_weather], options=SHORT)
    assert answer.done
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}]}
    result = {"role": "tool", "content": "rain", "tool_name": "get_weather"}
    assert slow.chat(model, [*HELLO, called, result], tools=[get_weather], options=SHORT).message.content is not None


def test_errors_are_typed(fast, model):
    with pytest.raises(ollama.ResponseError, match="does not exist") as refusal:
        fast.chat("other", HELLO)
    assert refusal.value.status_code == 404


def test_embed(slow, model):
    answer = slow.embed(model, ["a", "b"], dimensions=8)
    assert [len(one) for one in answer.embeddings] == [8, 8]
    assert len(slow.embeddings(model, "a").embedding) > 8
