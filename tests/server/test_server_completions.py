import asyncio

import openai
import pytest
from fake_async_engine import MODEL, answer
from openai.types import Completion
from pydantic import TypeAdapter


def test_a_whole_answer_has_openai_s_shape(http):
    body = http.post("/v1/completions", json={"model": MODEL, "prompt": "a b", "max_tokens": 3}).json()
    answered = TypeAdapter(Completion).validate_python(body, strict=True)
    assert answered.id.startswith("cmpl-")
    assert answered.object == "text_completion"
    [choice] = answered.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "a b a ", "length", None)
    assert (answered.usage.prompt_tokens, answered.usage.completion_tokens, answered.usage.total_tokens) == (3, 3, 6)


def test_sixteen_tokens_unless_told_otherwise(client, engine):
    assert client.completions.create(model=MODEL, prompt="a").usage.completion_tokens == 16
    # Near the end of the context the default gives way, while a number that was asked for does not.
    long = "a " * 1020
    assert client.completions.create(model=MODEL, prompt=long).usage.total_tokens == engine.facts["max_model_len"]
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=long, max_tokens=16)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a b", ["a b "]),
        ([97, 98], ["ab ab "]),
        (["a", "b c"], ["a a ", "b c "]),
        ([[97], [98, 99], [100]], ["a a ", "bc bc ", "d d "]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_text_or_tokens_or_lists_of_either(client, prompt, texts, stream):
    if not stream:
        answered = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
        assert [(choice.index, choice.text) for choice in answered.choices] == list(enumerate(texts))
        assert answered.usage.completion_tokens == 2 * len(texts)
        return
    got, finishes = [""] * len(texts), [0] * len(texts)
    for chunk in client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, stream=True):
        [choice] = chunk.choices
        got[choice.index] += choice.text
        finishes[choice.index] += choice.finish_reason is not None
    assert got == texts
    assert finishes == [1] * len(texts)


def test_one_failing_prompt_ends_its_request_and_the_others_of_it(http, engine):
    response = http.post("/v1/completions", json={"prompt": ["slow a", "boom", "slow b"], "max_tokens": 500})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "request_failed"
    assert engine.left_early == engine.started == 3


def test_streams_side_by_side_each_get_their_own_text(base):
    async def one(client, i):
        prompt, tokens = f"slow ride {i} up", 1 + i % 40
        stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=tokens, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == answer(prompt, tokens)

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0) as client:
            await asyncio.gather(*(one(client, i) for i in range(64)))

    asyncio.run(all_of_them())
