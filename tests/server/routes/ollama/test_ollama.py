"""Ollama's API, driven by Ollama's own client."""

import json
import math
import re

import ollama
import pytest
from scripted_engine import answer
from server_here import MODEL

from chairlift.chat_template import ChatTemplate
from chairlift.checkpoint.info import CheckpointInfo
from chairlift.engine.engine_info import EngineInfo
from chairlift.errors import InvalidRequest
from chairlift.server.routes.ollama.fields import keep_alive_seconds

pytestmark = pytest.mark.shared_server

HELLO = [{"role": "user", "content": "one two"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


@pytest.fixture
def llama(base):
    return ollama.Client(base, timeout=30)


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: where
    """
    return city


def test_a_chat_whole_and_streamed(llama):
    whole = llama.chat(MODEL, HELLO, options={"num_predict": 4})
    assert (whole.message.content, whole.done, whole.done_reason) == (answer("one two", 4), True, "length")
    assert (whole.prompt_eval_count, whole.eval_count, whole.model) == (7, 4, MODEL)
    assert whole.total_duration > 0
    parts = list(llama.chat(MODEL, HELLO, stream=True, options={"num_predict": 4}))
    assert "".join(part.message.content for part in parts) == answer("one two", 4)
    assert [part.done for part in parts] == [False] * 4 + [True]
    assert parts[-1].eval_count == 4


def test_a_prompt_whole_and_streamed(llama, engine):
    whole = llama.generate(f"{MODEL}:latest", "one two", system="be", options={"num_predict": 3})
    assert (whole.response, whole.done_reason) == (answer("be one two", 3), "length")
    assert [message["role"] for message in engine.tokenizer.rendered[-1][0]] == ["system", "user"]
    parts = llama.generate(MODEL, "one two", stream=True, options={"num_predict": 3})
    assert "".join(part.response for part in parts) == answer("one two", 3)


def test_streams_are_lines_and_the_default(http):
    response = http.post("/api/chat", json={"messages": HELLO, "options": {"num_predict": 2}})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False, False, True]


def test_options_and_formats_reach_the_engine(llama, http, engine):
    options = {"temperature": 0.5, "top_k": 3, "repeat_penalty": 1.5, "stop": ["x"], "seed": 7, "num_predict": -1, "num_ctx": 99}
    llama.chat(MODEL, HELLO, options=options, format={"type": "object"}, keep_alive="5m")
    params = engine.seen[-1]
    assert (params.temperature, params.top_k, params.repetition_penalty, params.stop, params.seed) == (0.5, 3, 1.5, ("x",), 7)
    assert params.max_tokens == 2048 - 7
    assert params.structured_output.kind == "json"
    friend = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema = {"type": "object", "properties": {"friends": {"items": {"$ref": "#/$defs/f"}}}, "required": ["friends"]}
    llama.chat(MODEL, HELLO, format=schema | {"$defs": {"f": friend}})
    no_others = {"additionalProperties": False}
    assert json.loads(engine.seen[-1].structured_output.text) == schema | no_others | {"$defs": {"f": friend | no_others}}
    http.post("/api/chat", json={"messages": HELLO, "options": {"top_k": 40.0, "seed": -1, "num_predict": 0}})
    assert (engine.seen[-1].top_k, engine.seen[-1].seed, engine.seen[-1].max_tokens) == (40, None, 2048 - 7)
    assert http.post("/api/chat", content=b'{"messages": [{"role": "user"}], "options": {"top_k": 1e400}}').status_code == 400
    llama.generate(MODEL, "x", format="json", options={"num_predict": 1})
    assert engine.seen[-1].structured_output.kind == "json_object"


@pytest.mark.parametrize("raw", [False, True])
def test_an_answer_ends_with_the_context(llama, raw):
    whole = llama.generate(MODEL, "a " * 1020, raw=raw, options={"num_predict": 20})
    assert (whole.prompt_eval_count, whole.eval_count, whole.done_reason) == (2040, 8, "length")


def test_tools_are_called(llama, engine):
    messages = [{"role": "user", "content": f"SAY:I look. {CALL}{CALL}"}]
    whole = llama.chat(MODEL, messages, tools=[weather])
    assert whole.message.content == "I look."
    assert [call.function.arguments for call in whole.message.tool_calls] == [{"city": "Bern"}] * 2
    calls = [call for part in llama.chat(MODEL, messages, tools=[weather], stream=True) for call in part.message.tool_calls or ()]
    assert [call.function.name for call in calls] == ["weather"] * 2
    llama.chat(MODEL, [*HELLO, whole.message, {"role": "tool", "content": "rain", "tool_name": "weather"}], options={"num_predict": 1})
    called, result = engine.tokenizer.rendered[-1][0][1:]
    untyped = {"function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    assert llama.chat(MODEL, messages, tools=[untyped]).message.tool_calls[0].function.name == "weather"
    assert "tool_call" in called["content"] or called["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert "rain" in result["content"]


@pytest.mark.parametrize("kind", [{}, {"type": ""}, {"type": None}])
def test_calls_have_ids_and_numbers(http, engine, kind):
    messages = [{"role": "User", "content": f"SAY:{CALL}{CALL}"}]
    asked = {"messages": messages, "tools": [{**kind, "function": {"name": "weather"}}], "stream": False}
    said = http.post("/api/chat", json=asked).json()["message"]
    assert [call["function"]["index"] for call in said["tool_calls"]] == [0, 1]
    ids = [call["id"] for call in said["tool_calls"]]
    assert len(set(ids)) == 2
    results = [{"role": "tool", "content": "rain", "tool_call_id": id} for id in ids]
    assert http.post("/api/chat", json={"messages": [*messages, said, *results], "options": {"num_predict": 1}}).status_code == 200
    called, *answered = engine.tokenizer.rendered[-1][0][1:]
    assert [call["id"] for call in called["tool_calls"]] == [turn["tool_call_id"] for turn in answered] == ids


def test_thinking_has_its_own_field(llama, http, engine, server, monkeypatch):
    engine.tokenizer.template = ChatTemplate({"default": "{{ messages }}</think>"}, {})
    engine.tokenizer.template_source = engine.tokenizer.template.default
    messages = [{"role": "user", "content": "SAY:<think>Two.</think>Four"}]
    asked = {"messages": messages, "think": True, "stream": False}
    assert "x-chairlift-ignored" not in http.post("/api/chat", json=asked).headers
    whole = llama.chat(MODEL, messages, think=True)
    assert (whole.message.thinking, whole.message.content) == ("Two.", "Four")
    assert engine.tokenizer.rendered[-1][1]["enable_thinking"] is True
    parts = list(llama.generate(MODEL, messages[0]["content"], think="low", stream=True))
    assert "".join(part.thinking or "" for part in parts) == "Two."
    assert "".join(part.response for part in parts) == "Four"
    assert engine.tokenizer.rendered[-1][1]["reasoning_effort"] == "low"
    assert "thinking" in llama.show(MODEL).capabilities
    monkeypatch.setattr(server[1].default, "reasoning_parser", "none")
    assert "thinking" not in llama.show(MODEL).capabilities


DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "134.52M",
    "quantization_level": "Q4_1",
}


def test_the_model_is_described(llama, http):
    [listed] = llama.list().models
    assert (listed.model, listed.size, listed.digest) == (MODEL, 96_577_024, "ab" * 32)
    [running] = llama.ps().models
    assert (running.model, running.context_length, running.digest) == (MODEL, 2048, "ab" * 32)
    assert (running.size, running.size_vram) == (10**9, 0)
    assert http.get("/api/tags").json()["models"][0]["details"] == http.get("/api/ps").json()["models"][0]["details"] == DETAILS
    shown = llama.show(MODEL)
    assert (shown.template, shown.modelinfo["llama.context_length"], shown.modelinfo["general.architecture"]) == (
        *("{{ messages }}", 2048, "llama"),
    )
    assert shown.details.model_dump() == DETAILS
    assert shown.modelinfo["general.parameter_count"] == 134_515_008
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert http.post("/api/show", json={"name": f"{MODEL}:latest"}).json()["details"] == DETAILS
    assert http.post("/api/show", json={"name": "other"}).status_code == 404


def test_what_is_not_known_before_the_first_start_is_empty(http, engine, server, monkeypatch):
    monkeypatch.setattr(engine, "_info", EngineInfo())
    [listed] = http.get("/api/tags").json()["models"]
    assert (listed["size"], listed["details"]["families"], listed["details"]["family"]) == (0, [], "")
    assert re.fullmatch("[0-9a-f]{64}", listed["digest"])  # `ollama list` shows the first 12 digits, and fails if there are fewer
    monkeypatch.setattr(server[1].default, "num_bytes", 7)
    assert http.get("/api/tags").json()["models"] == [listed | {"size": 7}]
    monkeypatch.setattr(server[1].default, "checkpoint", CheckpointInfo(architecture="LlamaForCausalLM", weight_format="safetensors"))
    details = listed["details"] | {"format": "safetensors", "family": "llama", "families": ["llama"]}
    assert http.get("/api/tags").json()["models"] == [listed | {"size": 7, "details": details}]


def test_memory_of_a_device_is_told(http, engine):
    before = engine.info.decisions
    engine.describe(decisions=[["device", "cuda", "there is one"]])
    [running] = http.get("/api/ps").json()["models"]
    engine.describe(decisions=before)
    assert running["size_vram"] == running["size"]


def test_the_version_is_one_that_clients_take(http):
    assert tuple(map(int, http.get("/api/version").json()["version"].split("."))) >= (0, 13, 4)


def test_a_raw_prompt_has_no_template(llama, engine):
    rendered = len(engine.tokenizer.rendered)
    assert llama.generate(MODEL, "one two", raw=True, options={"num_predict": 3}).response == answer("one two", 3)
    assert "".join(part.response for part in llama.generate(MODEL, "one two", raw=True, stream=True, options={"num_predict": 3})) == answer(
        "one two", 3
    )
    assert llama.generate(MODEL, "SAY:<think>a</think>b", raw=True).response == "<think>a</think>b"
    assert len(engine.tokenizer.rendered) == rendered


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        *[
            ("5m0s", 300),
            ("1h30m", 5400),
            ("1h0m0.5s", 3600.5),
            ("300ms", 0.3),
            ("1us", 1e-6),
            ("1µs", 1e-6),
            ("1μs", 1e-6),
            ("1s5ns", 1 + 5e-9),
            ("90", 90),
            (90, 90),
            (1.5, 1.5),
            (0, 0),
            ("0s", 0),
            ("0", 0),
        ],
        *[(-1, math.inf), ("-1", math.inf), ("-1m0s", math.inf), (1e300, 1e300)],
    ],
)
def test_durations_may_be_numbers_or_go_s(keep_alive, seconds):
    assert keep_alive_seconds(keep_alive) == seconds


@pytest.mark.parametrize("keep_alive", ["", "m", "5 minutes", "5m0", "1.2.3s", "--1", True, [], {}, "nan", "inf", 10**400])
def test_durations_that_are_none(keep_alive):
    with pytest.raises(InvalidRequest, match="keep_alive must be"):
        keep_alive_seconds(keep_alive)


@pytest.mark.parametrize("messages", [None, []])
def test_go_s_client_sends_no_messages_as_null(http, messages):
    asked = {"model": MODEL, "messages": messages, "options": None, "stream": False}
    assert http.post("/api/chat", json=asked).json()["done_reason"] == "load"


def test_an_empty_request_loads_the_model(llama, engine):
    assert llama.generate(MODEL).done_reason == "load"
    assert llama.generate(MODEL, keep_alive=0).done_reason == "load"  # the only model stays loaded
    assert llama.chat(MODEL, []).done_reason == "load"
    assert not engine.seen


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("chat", {"messages": HELLO, "options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ("chat", {"messages": HELLO, "options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"messages": HELLO, "options": {"num_predict": False}}, "options.num_predict"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images are not supported"),
        ("chat", {"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": HELLO, "format": "xml"}, "format must be a JSON schema"),
        ("chat", {"messages": HELLO, "think": "hard"}, "think is invalid: it should be true, false, low, medium, high or max, got 'hard'"),
        ("chat", {"messages": HELLO, "think": 1}, "think is invalid"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "leave out system, or raw"),
        ("generate", {"prompt": "a " * 1500, "raw": True}, "prompt too long"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "images is not supported"),
        ("generate", {"prompt": "x", "context": [1]}, "context is not supported"),
        ("chat", {"messages": [{"role": "user", "content": "a " * 3000}]}, "prompt too long; exceeded max context length by 3953 tokens"),
        ("generate", {"prompt": "full"}, "4 requests are waiting"),
        ("embed", {"input": "x"}, "no embeddings"),
    ],
)
def test_errors_are_texts(http, path, body, says):
    response = http.post(f"/api/{path}", json=body)
    assert response.status_code in (400, 503)
    assert says in response.json()["error"]


def test_another_model_is_not_found(llama):
    for ask in (llama.show, llama.generate, lambda model: llama.chat(model, HELLO)):
        with pytest.raises(ollama.ResponseError, match="does not exist") as refusal:
            ask("other")
        assert refusal.value.status_code == 404


def test_a_stream_that_fails_ends_with_an_error(llama):
    with pytest.raises(ollama.ResponseError, match="no usable answer"):
        list(llama.generate(MODEL, "boom", stream=True))


def test_options_without_effect_are_named(http):
    response = http.post("/api/generate", json={"prompt": "x", "options": {"repeat_last_n": 7, "num_gpu": 1, "num_predict": 1}, "odd": 1})
    assert response.headers["x-chairlift-ignored"] == "odd, options.repeat_last_n"


@pytest.mark.parametrize(("think", "ignored"), [(True, "think"), ("low", "think"), (False, None), (None, None)])
def test_a_model_without_reasoning_ignores_think_and_says_so(http, engine, think, ignored):
    for path, body in (("chat", {"messages": HELLO}), ("generate", {"prompt": "x"})):
        response = http.post(f"/api/{path}", json={**body, "think": think, "options": {"num_predict": 1}})
        assert (response.status_code, response.headers.get("x-chairlift-ignored")) == (200, ignored)
    del engine.tokenizer.template  # a model without one continues raw prompts
    raw = http.post("/api/generate", json={"prompt": "x", "raw": True, "think": think, "options": {"num_predict": 1}})
    assert (raw.status_code, raw.headers.get("x-chairlift-ignored")) == (200, ignored)


@pytest.mark.parametrize("body", [{"model": MODEL}, {"name": f"{MODEL}:latest", "stream": False}])
def test_a_served_model_is_pulled_at_once(http, llama, body):
    assert http.post("/api/pull", json=body).json() == {"status": "success"}
    assert [part.status for part in llama.pull(MODEL, stream=True)] == ["success"]


def test_models_are_changed_only_on_the_operators_socket(http):
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        reply = http.request(method, path, json={"model": "org/name"})
        assert (reply.status_code, "--admin-socket" in reply.json()["error"]) == (403, True)
