import asyncio

import openai
import pytest
from events import events
from openai.types import Completion
from pydantic import TypeAdapter
from scripted_engine import answer, word_token
from server_here import MODEL

from chairlift.errors import EngineDead
from chairlift.outputs import Timing
from chairlift.server import generation


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
    assert client.completions.create(model=MODEL, prompt=long).usage.total_tokens == engine.info.max_model_len
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
    response = http.post("/v1/completions", json={"prompt": ["paused a", "boom", "paused b"], "max_tokens": 99})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "request_failed"
    assert engine.left_early == engine.started == 3


@pytest.mark.slow
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


def test_logprobs_are_four_columns(http):
    body = http.post("/v1/completions", json={"prompt": "ab c", "max_tokens": 2, "logprobs": 1}).json()
    TypeAdapter(Completion).validate_python(body, strict=True)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["ab ", "c "],
        "token_logprobs": [-0.75, -0.75],
        "top_logprobs": [{"x": -0.25, "ab ": -0.75}, {"x": -0.25, "c ": -0.75}],  # the token itself is there, likely or not
        "text_offset": [0, 3],
    }


def test_as_harnesses_score_an_answer_to_a_prompt(http):
    """lm-eval's way: prompt and answer as tokens, echoed with their log-probabilities, and one token that it does not look at."""
    requested = {"model": MODEL, "prompt": [[97, 98, 99]], "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1234, "temperature": 0}
    [choice] = http.post("/v1/completions", json=requested).json()["choices"]
    assert choice["text"] == "abcabc "
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "abc "]
    assert logprobs["token_logprobs"] == [None, -0.75, -0.75, -0.75]
    assert logprobs["top_logprobs"] == [None, {"x": -0.25, "b": -0.75}, {"x": -0.25, "c": -0.75}, {"x": -0.25, "abc ": -0.75}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_scored_alone(http, stream):
    requested = {
        "prompt": ["añ", "b"],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 0,
        "n": 2,
        **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
    }
    response = http.post("/v1/completions", json=requested)
    if stream:
        *pieces, last, _ = events(response)
        assert sum(piece["choices"][0]["finish_reason"] == "length" for piece in pieces) == 4
        choices = [piece["choices"][0] for piece in pieces if piece["choices"][0]["logprobs"]]
        usage = last["usage"]
    else:
        choices, usage = response.json()["choices"], response.json()["usage"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 4
    texts = {choice["index"]: (choice["text"], choice["logprobs"]["tokens"]) for choice in choices}
    parts = ["a", r"bytes:\xc3", r"bytes:\xb1"]
    assert texts == {0: ("añ", parts), 1: ("añ", parts), 2: ("b", ["b"]), 3: ("b", ["b"])}
    assert choices[0]["logprobs"]["text_offset"] == [0, 1, 1]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)


def test_a_stream_with_echo_is_the_whole_in_parts(http):
    requested = {"prompt": "ab", "max_tokens": 2, "echo": True, "logprobs": 2, "n": 2}
    whole = http.post("/v1/completions", json=requested).json()["choices"]
    streamed = [{"index": index, "text": "", "columns": {}} for index in range(2)]
    for reported in events(http.post("/v1/completions", json=requested | {"stream": True}))[:-1]:
        [piece] = reported["choices"]
        choice = streamed[piece["index"]]
        choice["text"] += piece["text"]
        for name, column in piece["logprobs"].items():
            choice["columns"].setdefault(name, []).extend(column)
    assert [(one["text"], one["logprobs"]) for one in whole] == [(one["text"], one["columns"]) for one in streamed]
    assert whole[0]["text"] == "abab ab "


def test_prompt_logprobs_are_in_vllm_s_shape(http):
    [choice] = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 1}).json()["choices"]
    reported = {"120": {"logprob": -0.25, "rank": 1, "decoded_token": "x"}, "98": {"logprob": -0.75, "rank": 3, "decoded_token": "b"}}
    assert choice["prompt_logprobs"] == [None, reported]
    assert (choice["text"], choice["logprobs"]) == ("ab ", None)


def test_tokens_can_be_told_by_their_ids(http):
    requested = {"prompt": "ab", "max_tokens": 1, "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    logprobs = http.post("/v1/completions", json=requested).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98", f"token_id:{word_token('ab ')}"]
    assert logprobs["top_logprobs"][1] == {"token_id:120": -0.25, "token_id:98": -0.75}


def test_the_end_of_a_prompt_can_do(http):
    requested = {"prompt": ["long story", "brief"], "max_tokens": 1, "truncate_prompt_tokens": 5, "echo": True}
    body = http.post("/v1/completions", json=requested).json()
    assert [choice["text"] for choice in body["choices"]] == ["storystory ", "briefbrief "]
    assert body["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize(
    ("stream", "options"), [(False, {"metrics": True}), (True, {"metrics": True}), (True, {"stream_options": {"include_metrics": True}})]
)
def test_timings_come_at_the_end_if_asked_for(http, engine, options, stream):
    engine.shown = {"timing": Timing(0.001, 0.001, 0.002, 0.003)}
    response = http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "stream": stream, **options})
    reported = events(response)[-2] if stream else response.json()
    assert reported["metrics"]["time_to_first_token_ms"] == 2.0
    assert not stream or (reported["choices"] == [] and "usage" not in reported)


@pytest.mark.parametrize("stream", [False, True])
def test_the_energy_comes_in_usage_if_asked_for(http, engine, stream):
    requested = {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "energy": True, "stream": stream}
    requested |= {"stream_options": {"include_usage": True}} if stream else {}

    def energy():
        response = http.post("/v1/completions", json=requested)
        return (events(response)[-2] if stream else response.json())["usage"]["energy"]

    assert energy() == {"joules": None, "method": None}  # no meter
    engine.describe(energy_method="powercap")
    engine.shown = {"timeline": {"energy_joules": 0.5}}
    assert energy() == {"joules": 2.0, "method": "powercap"}


@pytest.mark.parametrize("dead", [False, True])
def test_an_answer_is_complete_although_the_engine_does_not_report_its_energy(http, engine, monkeypatch, dead):
    async def explain(request_id):
        if dead:
            raise EngineDead("the engine's process ended")
        await asyncio.Event().wait()

    monkeypatch.setattr(generation, "_ENERGY_SECONDS", 0.01)
    monkeypatch.setattr(engine, "explain", explain)
    engine.describe(energy_method="powercap")
    response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "best_of": 2, "energy": True})
    assert response.status_code == 200
    assert response.json()["usage"]["energy"] == {"joules": None, "method": "powercap"}


def test_fields_of_every_kind_reach_the_engine(http, engine):
    fields = {
        "min_tokens": 2,
        "bad_words": ("x",),
        "allowed_token_ids": (1, 2),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "logit_bias": {"7": -5, "8": 1.5}, **fields})
    assert response.status_code == 200, response.text
    [params] = engine.seen
    expected = fields | {"bad_words": ((ord("x"),), (ord(" "), ord("x")))}  # as tokens, also after a space
    assert {name: getattr(params, name) for name in fields} == expected
    assert params.logit_bias == {7: -5, 8: 1.5}
    assert (params.logprobs, params.prompt_logprobs) == (None, None)


def test_a_request_can_be_named_in_its_body(http, engine):
    answered = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "request_id": "mine:7"})
    assert http.get("/v1/requests/mine:7/explain").json()["id"] == answered.json()["id"]


def test_null_is_absent(http, engine):
    names = (
        "stop",
        "logit_bias",
        "echo",
        "suffix",
        "logprobs",
        "prompt_logprobs",
        "best_of",
        "user",
        "stream_options",
        "bad_words",
        "seed",
    )
    assert http.post("/v1/completions", json={"prompt": "a", **dict.fromkeys(names)}).status_code == 200
    assert engine.seen[0].stop == ()


@pytest.mark.parametrize(("stop", "left"), [("", ()), ([""], ()), (["", "x"], ("x",))])
def test_empty_stop_strings_and_an_empty_nucleus_have_a_meaning(http, engine, stop, left):
    answered = http.post("/v1/completions", json={"prompt": "a", "stop": stop, "top_p": 0, "max_tokens": 1})
    assert answered.status_code == 200, answered.text
    assert engine.seen[-1].stop == left
    assert 0 < engine.seen[-1].top_p < 1e-6, "less than the likeliest of any vocabulary's tokens"


def test_the_default_length_makes_room_for_the_least(http, engine):
    answer = http.post("/v1/completions", json={"prompt": "a b", "min_tokens": 20}).json()
    assert answer["usage"]["completion_tokens"] == 20
    assert engine.seen[-1].max_tokens == 20
