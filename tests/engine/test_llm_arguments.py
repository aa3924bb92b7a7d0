"""What callers in Python may type: it works, or a typed error says in Python's words what to write instead."""

import asyncio
import dataclasses
import json

import counting_engine
import numpy as np
import pydantic
import pytest

from chairlift import LLM, AsyncEngine, EngineConfig, SamplingParams, StructuredOutput
from chairlift.engine.engine_settings import ModelSettings
from chairlift.errors import InvalidRequest, InvalidSetting

PARAMS = SamplingParams(max_tokens=1)
SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


class City(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ({"prompt": "ab"}, [[97, 98]]),
        ([{"prompt_token_ids": (5, 6)}, {"prompt": "b"}, "c", [8]], [[5, 6], [98], [99], [8]]),
        (("a", "b"), [[97], [98]]),
        ((text for text in "ab"), [[97], [98]]),
        (np.array([5, 6]), [[5, 6]]),
        ([np.array([5, 6]), [np.int64(7)]], [[5, 6], [7]]),
        ([], []),
    ],
)
def test_prompts_of_every_form(llm, prompts, ids):
    assert [output.prompt_token_ids for output in llm.generate(prompts, PARAMS)] == ids


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.generate(None), "prompts must be text, a list of token ids, .* got None"),
        (lambda llm: llm.generate(5), "prompts must be text, a list of token ids, .* got 5"),
        (lambda llm: llm.generate(["a", None]), "prompt 1: a prompt is text, .* got None"),
        (lambda llm: llm.generate(b"a"), "prompt 0: a prompt is text, .* got b'a'"),
        (lambda llm: llm.generate(bytearray(b"ab")), r"prompt 0: a prompt is text, .* got bytearray\(b'ab'\)"),
        (lambda llm: llm.generate(["a", memoryview(b"ab")]), "prompt 1: a prompt is text, .* got <memory"),
        (lambda llm: llm.generate({"prompt": bytearray(b"ab")}), "prompt 0: a prompt is text"),
        (lambda llm: llm.generate({"text": "a"}), "prompt 0: a prompt is text, .* {\"prompt\": text} .* got {'text'"),
        (lambda llm: llm.generate("a", {"max_tokens": 1}), r"params must be SamplingParams, got \{.*: write SamplingParams\(\*\*params\)"),
        (lambda llm: llm.generate(["a"], [{"max_tokens": 1}]), "params must be SamplingParams, got"),
        (lambda llm: llm.generate("a", "greedy"), "params must be SamplingParams, got 'greedy'"),
        (
            lambda llm: llm.generate("a", scheduling={"priority": 1}),
            r"scheduling must be Scheduling, .* write Scheduling\(\*\*scheduling\)",
        ),
        (lambda llm: llm.stream_chat([]), "a conversation is a list of messages"),
        (lambda llm: llm.chat(None), "a conversation is a list of messages"),
        (lambda llm: llm.chat("hello"), "a conversation is a list of messages"),
        (lambda llm: llm.chat(["hello"]), "a conversation is a list of messages"),
    ],
)
def test_wrong_calls_are_invalid_requests(llm, call, says):
    with pytest.raises(InvalidRequest, match=says):
        call(llm)
    assert not llm.engine.running


def test_the_asynchronous_engine_says_the_same(monkeypatch):
    counting_engine.install(monkeypatch.setattr)
    cases = [
        ("a prompt is text", lambda engine: engine.generate({"prompt": None})),
        ("params must be SamplingParams", lambda engine: engine.generate("a", {"max_tokens": 1})),
        ("scheduling must be Scheduling", lambda engine: engine.generate("a", PARAMS, {"priority": 1})),
        ("a conversation is a list of messages", lambda engine: engine.chat([])),
        ("request_id must be a string of 1 to 256 characters", lambda engine: engine.generate("a", PARAMS, request_id=["x"])),
        ("request_id must be a string", lambda engine: engine.generate("a", PARAMS, request_id=5)),
        ("request_id must be a string", lambda engine: engine.generate("a", PARAMS, request_id="x" * 257)),
    ]

    async def main():
        async with asyncio.timeout(60), AsyncEngine() as engine:
            outputs = [output async for output in engine.generate({"prompt_token_ids": [5]}, PARAMS)]
            assert outputs[0].prompt_token_ids == [5]
            for says, call in cases:
                with pytest.raises(InvalidRequest, match=says):
                    await anext(call(engine))
            assert engine.open_sequences == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"bad_words": 5}, "bad_words must be a list, got 5"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list, got 5"),
        ({"logit_bias": [1]}, "logit_bias must be a dict of numbers by token id"),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False"),
        ({"temperature": "0"}, "temperature must be a number"),
        ({"top_k": np.array([1, 2])}, r"top_k must be an integer from 0 to .*, got array\(\[1, 2\]\)"),
        ({"structured_output": "json"}, "structured_output must be a StructuredOutput, a JSON schema as a dict"),
        ({"structured_output": {"json": {"a": object()}}}, "structured_output is not JSON"),
        ({"structured_output": {"json": SCHEMA, "disable_any_whitespace": "yes"}}, "disable_any_whitespace must be true or false"),
        ({"structured_output": {"regex": "a", "disable_any_whitespace": True}}, "disable_any_whitespace needs json or json_object"),
        ({"structured_output": {"regx": "a+"}}, r"must be a JSON schema or have just one of json, .*, got 'regx': did you mean regex\?"),
        ({"structured_output": {"choices": ["a"]}}, r"got 'choices': did you mean choice\?"),
        ({"structured_output": {"regex": "a", "choice": ["b"]}}, "just one of .*, got 'regex', 'choice'$"),
        ({"structured_output": {"json_schema": SCHEMA}}, "got 'json_schema'"),
        ({"structured_output": {"structural_tag": "a"}}, "got 'structural_tag'"),
        ({"structured_output": {"disable_any_whitespace": True}}, "must be a JSON schema"),
    ],
)
def test_wrong_sampling_params(fields, says):
    with pytest.raises(InvalidRequest, match=says):
        SamplingParams(**fields)


def test_sampling_params_as_in_vllm():
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, top_k=-1)
    assert params == SamplingParams()


@pytest.mark.parametrize(
    ("given", "kind", "form"),
    [
        (SCHEMA, "json", SCHEMA),
        ({}, "json", {}),
        ({"x-note": 1, "enum": [1]}, "json", {"x-note": 1, "enum": [1]}),
        ({"json": SCHEMA}, "json", SCHEMA),
        (StructuredOutput("json", SCHEMA), "json", SCHEMA),
        (("json", json.dumps(SCHEMA)), "json", SCHEMA),
        (["json", json.dumps(SCHEMA), "response_format"], "json", SCHEMA),  # as it comes out of msgpack
        (City, "json", City.model_json_schema()),
        ({"json": City}, "json", City.model_json_schema()),
        ({"choice": ["a", "b"]}, "choice", ["a", "b"]),
        (StructuredOutput("choice", ["a", "b"]), "choice", ["a", "b"]),
    ],
)
def test_schemas_and_choices_as_python_values(given, kind, form):
    structure = SamplingParams(structured_output=given).structured_output
    assert (structure.kind, json.loads(structure.text)) == (kind, form)


@pytest.mark.parametrize(("given", "reported"), [({"regex": "a+"}, ("regex", "a+")), ({"json_object": True}, ("json_object", ""))])
def test_other_structures(given, reported):
    assert SamplingParams(structured_output=given).structured_output[:2] == reported


def test_structured_outputs_is_another_name_of_structured_output():
    params = SamplingParams(structured_outputs={"regex": "a+"})
    assert params == SamplingParams(structured_output={"regex": "a+"})
    assert dataclasses.replace(params, seed=1).structured_output[:2] == ("regex", "a+")
    with pytest.raises(InvalidRequest, match="are the same: give one"):
        SamplingParams(structured_outputs={"regex": "a+"}, structured_output={"regex": "a+"})


def test_whitespace_can_be_turned_off():
    options = {"disable_any_whitespace": True}
    for given in ({"json": SCHEMA, **options}, {**SCHEMA, **options}, StructuredOutput("json", SCHEMA, disable_any_whitespace=True)):
        structure = SamplingParams(structured_output=given).structured_output
        assert (structure.kind, json.loads(structure.text), structure.disable_any_whitespace) == ("json", SCHEMA, True)
    assert not SamplingParams(structured_output={"json": SCHEMA}).structured_output.disable_any_whitespace


def test_editors_know_every_setting():
    fields = {field.name: field.type for field in dataclasses.fields(EngineConfig) if field.name != "shared_max_model_len"}
    hints = {name: hint.__forward_arg__ for name, hint in ModelSettings.__annotations__.items()}
    assert hints == fields | {"model": "str | os.PathLike[str]"}


@pytest.mark.parametrize("engine", [LLM, AsyncEngine])
@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        ({"max_num_seq": 4}, TypeError, r"got an unexpected keyword argument 'max_num_seq': did you mean max_num_seqs\?"),
        ({"zzz": 4}, TypeError, "got an unexpected keyword argument 'zzz'$"),
        ({"model": None}, InvalidSetting, "model must be a name or a path, got None"),
        ({"max_num_seqs": "4"}, InvalidSetting, "^max_num_seqs: expected a whole number, got '4'"),
        ({"max_num_seqs": True}, InvalidSetting, "^max_num_seqs: expected a whole number, got True"),
        ({"swap_space": 4.0}, InvalidSetting, "^swap_space: expected a whole number"),
        ({"enforce_eager": "yes"}, InvalidSetting, "^enforce_eager: expected True or False"),
        ({"tenant_weights": {"a": "x"}}, InvalidSetting, "^tenant_weights: expected a dict of whole numbers"),
        ({"load_format": "dumy"}, InvalidSetting, "^load_format: expected one of auto, dummy, none, got 'dumy'"),
        ({"max_num_seqs": 0}, InvalidSetting, "^max_num_seqs must be at least 1"),
        ({"max_num_seqs": np.array([1, 2])}, InvalidSetting, "^max_num_seqs: expected a whole number, got array"),
        ({"max_num_seqs": np.float32(2)}, InvalidSetting, "^max_num_seqs: expected a whole number, got 2.0"),
    ],
)
def test_wrong_settings(engine, settings, kind, says):
    with pytest.raises(kind, match=says):
        engine(**settings)


def test_settings_may_be_numbers_of_numpy():
    config = EngineConfig(max_num_seqs=np.int64(3), queue_ageing_ms=np.float32(0.5), gather_ms=np.int64(3), enforce_eager=np.bool_(True))
    values = (config.max_num_seqs, config.queue_ageing_ms, config.gather_ms, config.enforce_eager)
    assert [(type(value), value) for value in values] == [(int, 3), (float, 0.5), (int, 3), (bool, True)]


def test_home_directories_are_found(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = EngineConfig(journal="~/a.journal", prefix_cache_dir="~/cache", enable_lora=True, lora_modules={"sql": "~/sql"})
    assert (config.journal, config.prefix_cache_dir) == ("/home/me/a.journal", "/home/me/cache")
    assert config.lora_modules == {"sql": "/home/me/sql"}


def test_a_model_may_be_a_path(tmp_path):
    assert AsyncEngine(model=tmp_path).config == AsyncEngine(tmp_path).config == EngineConfig(model=str(tmp_path))


def test_a_model_may_be_the_first_argument_of_an_asynchronous_engine():
    assert AsyncEngine("org/name", seed=3).config == EngineConfig(model="org/name", seed=3)
    with pytest.raises(InvalidSetting, match="model must be a name or a path, got 5"):
        AsyncEngine(5)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'model'"):
        AsyncEngine("org/name", model="other")
