"""The whole way, from the openai client through the server's and the engine's processes to the default model and back."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import openai
import pydantic
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_here import wait_until

WORDS = ["mountain", "snow", "lift", "chair", "valley", "ski", "rope", "station", "summit", "cloud", "pine", "river", "stone", "bridge"]


@pytest.fixture(scope="module")
def real(model_dir):
    """Address of `chairlift serve` with few places and a small cache, so that requests queue and share."""
    flags = ["--port", "0", "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-model-len", "512", "--num-kv-blocks", "200"]
    command = [sys.executable, "-m", "chairlift.cli.main", "serve", str(model_dir), "--served-model-name", "smol", *flags]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        log = []
        address = None
        for line in process.stderr:
            log.append(line)
            if "listening on " in line:
                address = line.split("listening on ")[1].strip().removesuffix("/v1")
                break
        assert address, "".join(log)
        # Somebody has to read the rest, or the server would block on a full pipe.
        threading.Thread(target=lambda: log.extend(process.stderr), daemon=True).start()
        try:
            yield address
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "".join(log)
        finally:
            process.kill()


def metric(base, name):
    text = httpx.get(f"{base}/metrics").text
    [sample] = [s for f in text_string_to_metric_families(text) for s in f.samples if s.name == f"chairlift_{name}"]
    return sample.value


def ask(i):
    """A greedy request whose prompt and length are its own."""
    words = [WORDS[(i * k) % len(WORDS)] for k in range(1, 2 + i % 7)]
    return {"model": "smol", "prompt": f"{i}. The {' and the '.join(words)}", "max_tokens": 1 + i % 12, "temperature": 0}


@pytest.mark.slow
def test_sixty_four_streams_each_get_what_they_get_alone(real):
    async def stream(client, i):
        pieces, finishes = [], 0
        async for chunk in await client.completions.create(**ask(i), stream=True):
            pieces.append(chunk.choices[0].text)
            finishes += chunk.choices[0].finish_reason is not None
        assert finishes == 1
        return "".join(pieces)

    async def together_and_alone():
        async with openai.AsyncOpenAI(base_url=f"{real}/v1", api_key="any", max_retries=0) as client:
            together = await asyncio.gather(*(stream(client, i) for i in range(64)))
            alone = [await client.completions.create(**ask(i)) for i in range(0, 64, 5)]
        assert together[::5] == [one.choices[0].text for one in alone]
        assert len(set(together)) > 50

    asyncio.run(together_and_alone())


def test_a_conversation_streams_the_same_text_as_it_gives_whole(real):
    request = {"model": "smol", "messages": [{"role": "user", "content": "Greet me in Greek, with an emoji."}]}
    request |= {"max_tokens": 24, "temperature": 0}
    with openai.OpenAI(base_url=f"{real}/v1", api_key="any", max_retries=0) as client:
        whole = client.chat.completions.create(**request)
        chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 16  # the second time the prompt's blocks are there


@pytest.mark.slow
def test_a_hot_answer_that_is_returned_is_found_in_the_cache(real):
    """Its text almost surely has other tokens when it is tokenized again; the next prompt has the generated ones."""
    url, messages = f"{real}/v1/chat/completions", [{"role": "user", "content": "Odd words, please."}]
    fields = {"model": "smol", "temperature": 1.8, "top_p": 1}
    first = httpx.post(url, json={"messages": messages, "max_tokens": 30, "seed": 5, **fields}, timeout=60).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And more."}]
    second = httpx.post(url, json={"messages": messages, "max_tokens": 1, **fields}, timeout=60)
    computed = first["usage"]["total_tokens"] - 1
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16
    explanation = httpx.get(f"{real}/v1/requests/{second.json()['id']}/explain").json()
    assert "cache_miss" not in explanation


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_blocks_are_free_again_when_clients_have_gone(real, stream):
    generated = metric(real, "generation_tokens_total")
    request = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{real}/v1/completions", json=request, timeout=60) as response:
            assert next(response.iter_lines()).startswith("data: {")
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{real}/v1/completions", json=request, timeout=0.5)
    wait_until(lambda: metric(real, "num_requests_running") == 0 and metric(real, "kv_cache_usage_perc") == 0, seconds=60)
    assert metric(real, "generation_tokens_total") - generated < 500


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 2, "best_of": 4}])
def test_greedy_choices_say_what_one_says_alone(real, fields):
    request = {"prompt": "The lift goes up to the summit and", "max_tokens": 8, "temperature": 0}
    alone = httpx.post(f"{real}/v1/completions", json=request, timeout=60).json()
    body = httpx.post(f"{real}/v1/completions", json=request | fields, timeout=60).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (i, alone["choices"][0]["text"]) for i in range(fields["n"])
    ]
    drawn = fields.get("best_of", fields["n"])
    assert body["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == drawn * alone["usage"]["completion_tokens"]
    assert len(httpx.get(f"{real}/v1/requests/{body['id']}/explain").json()["sequences"]) == drawn


def test_a_request_is_explained_to_its_last_millisecond(real):
    request = {"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True, "priority": 2}
    answered = httpx.post(f"{real}/v1/completions", json=request, headers={"x-tenant-id": "alice"}, timeout=60).json()
    [sequence] = httpx.get(f"{real}/v1/requests/{answered['id']}/explain").json()["sequences"]
    assert sum(sequence["states"].values()) == pytest.approx(sequence["ended"] - sequence["arrived"], abs=1e-3)
    reported = ("finish", "tenant", "priority", "prompt_tokens", "output_tokens")
    assert [sequence[name] for name in reported] == ["length", "alice", 2, answered["usage"]["prompt_tokens"], 16]
    assert "prefill" in sequence["summary"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_make_its_deadline_is_dropped(real, stream):
    request = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "deadline_ms": 0.001, "stream": stream}
    response = httpx.post(f"{real}/v1/completions", json=request, timeout=60)
    assert response.status_code == 504
    body = response.json()
    assert body["error"]["code"] == "deadline_exceeded"
    assert (body["usage"]["prompt_tokens"] > 0, body["usage"]["completion_tokens"]) == (True, 0)


def test_what_the_engine_refuses_is_refused(real):
    with openai.OpenAI(base_url=f"{real}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as refused:
            client.completions.create(model="smol", prompt="ski " * 600)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="smol", prompt=[10**6])
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        assert client.models.retrieve("smol").id == "smol"


class Person(pydantic.BaseModel, extra="forbid"):
    name: str
    age: int


def test_an_answer_is_parsed_as_the_schema_that_was_asked_for(real):
    messages = [{"role": "user", "content": "Anna is 31 years old. Who is it?"}]
    request = {"model": "smol", "messages": messages, "max_tokens": 40, "temperature": 0}
    same = {"structured_outputs": {"json": Person.model_json_schema()}}
    choices = {"structured_outputs": {"choice": ["green", "blue"]}}
    with openai.OpenAI(base_url=f"{real}/v1", api_key="any", max_retries=0) as client:
        choice = client.chat.completions.parse(**request, response_format=Person).choices[0]
        streamed = client.chat.completions.create(**request, stream=True, extra_body=same)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        chosen = client.completions.create(model="smol", prompt="The sky is", extra_body=choices)
    assert isinstance(choice.message.parsed, Person)
    assert (choice.finish_reason, text) == ("stop", choice.message.content)
    assert chosen.choices[0].text in ("green", "blue")


@pytest.mark.slow
def test_a_form_that_cannot_be_used_harms_nobody_else(real):
    slow = {"name": "a", "schema": {"type": "integer", "multipleOf": 10_000_019}}
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)} | {"d1200": {}}
    poisoned = [
        {"response_format": {"type": "json_schema", "json_schema": slow}},
        {"structured_outputs": {"json": {"$defs": chain, "$ref": "#/$defs/d0"}}},
        {"structured_outputs": {"json": {"type": "hiccup"}}},
        {"structured_outputs": {"json": {"$ref": "http://169.254.169.254/s.json"}}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "start: foo"}},
    ]
    healthy = ask(11) | {"max_tokens": 24, "ignore_eos": True}
    alone = httpx.post(f"{real}/v1/completions", json=healthy, timeout=60).json()["choices"][0]["text"]

    async def together():
        async with httpx.AsyncClient(base_url=real, timeout=60) as client:
            text = asyncio.create_task(client.post("/v1/completions", json=healthy))
            refused = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"} | one)) for one in poisoned]
            leaving = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"} | poisoned[0]))
            await text
            leaving.cancel()
            return text.result().json()["choices"][0]["text"], await asyncio.gather(*refused)

    text, refused = asyncio.run(together())
    assert text == alone
    assert [answer.status_code for answer in refused] == [400] * len(poisoned)
    errors = [answer.json()["error"] for answer in refused]
    assert [error["param"] for error in errors] == ["response_format"] + ["structured_outputs"] * 5
    assert [error["code"] for error in errors[:2]] == ["grammar_timeout", "grammar_too_large"]
    wait_until(lambda: metric(real, "num_requests_running") == 0)


@pytest.mark.slow
def test_the_default_model_can_be_made_to_call_a_function(real):
    city = {"type": "string", "maxLength": 12}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    request = {
        "model": "smol",
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"{real}/v1", api_key="any", max_retries=0) as client, client.chat.completions.stream(**request) as stream:
        [choice] = stream.get_final_completion().choices
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city"}
