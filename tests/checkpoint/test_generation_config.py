"""Sampling settings that a checkpoint recommends."""

import json

import pytest
from gguf_files import gguf_of, tiny_model
from transformers import GenerationConfig

from chairlift import LLM, SamplingParams
from chairlift.checkpoint.generation_config import recommended_sampling, unused_settings
from chairlift.checkpoint.gguf import convert
from chairlift.checkpoint.locate import locate
from chairlift.config import DEFAULT_MODEL
from chairlift.errors import InvalidSetting
from chairlift.server.schema.fields import CompletionRequest


def write(directory, text):
    (directory / "generation_config.json").write_text(text)


def test_only_sampling_settings_that_are_set_are_taken(tmp_path):
    write(tmp_path, json.dumps({"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_new_tokens": 9, "eos_token_id": 2}))
    assert recommended_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20}


def test_other_settings_that_would_change_answers_are_reported(tmp_path, caplog):
    write(tmp_path, json.dumps({"stop_strings": ["a"], "bad_words_ids": [[1]], "typical_p": 1.0, "num_beams": 1, "min_length": 0}))
    assert recommended_sampling(tmp_path) == {}
    assert "sets stop_strings, bad_words_ids, which is not used" in caplog.text
    caplog.clear()
    write(tmp_path, json.dumps({"guidance_scale": None, "min_new_tokens": None, "transformers_version": "5.0.0", "pad_token_id": 3}))
    assert recommended_sampling(tmp_path) == {}
    assert caplog.text == ""


def test_settings_that_are_not_known_are_reported(tmp_path):
    usual = GenerationConfig(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0, max_new_tokens=9)
    write(tmp_path, usual.to_json_string(use_diff=False))
    assert unused_settings(tmp_path) == []
    others = {"presence_penalty": 1.5, "forced_eos_token_id": 2, "token_healing": True, "top_n_sigma": 1.0, "dry_multiplier": 0.0}
    write(tmp_path, json.dumps(json.loads(usual.to_json_string()) | others))
    assert unused_settings(tmp_path) == ["presence_penalty", "forced_eos_token_id", "token_healing", "top_n_sigma"]


def test_a_top_p_of_0_leaves_the_likeliest_token(tmp_path):
    write(tmp_path, json.dumps({"top_p": 0.0}))
    assert 0 < recommended_sampling(tmp_path)["top_p"] < 1e-6


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"eos_token_id": 2}'])
def test_a_model_may_recommend_nothing(tmp_path, text):
    if text is not None:
        write(tmp_path, text)
    assert recommended_sampling(tmp_path) == {}


@pytest.mark.parametrize("settings", [{"temperature": -1}, {"top_p": 2}, {"top_k": "many"}, {"min_p": [1]}])
def test_a_value_that_is_not_allowed_is_named_with_the_way_out(tmp_path, settings):
    write(tmp_path, json.dumps(settings))
    with pytest.raises(InvalidSetting, match=f"generation_config.json: {next(iter(settings))} .*--generation-config none"):
        recommended_sampling(tmp_path)


def test_the_default_model_has_its_authors_settings(model_dir):
    assert recommended_sampling(locate(DEFAULT_MODEL)) == {"temperature": 0.2, "top_p": 0.9}


def test_a_converted_model_recommends_what_it_was_given(tmp_path):
    file = tmp_path / "model.gguf"
    gguf_of(tiny_model("qwen2"), file)
    convert(file, tmp_path / "plain")
    convert(file, tmp_path / "other", {"top_k": 5})
    assert recommended_sampling(tmp_path / "plain") == {}
    assert recommended_sampling(tmp_path / "other") == {"top_k": 5}


def test_a_request_overrules_what_is_recommended():
    request = CompletionRequest.read({"prompt": "a", "top_p": 1})[0]
    params = request.params({"temperature": 0.2, "top_p": 0.9})
    assert (params.temperature, params.top_p) == (0.2, 1.0)


@pytest.mark.slow
def test_an_llm_without_params_samples_as_recommended(model_dir):
    llm = LLM(max_model_len=64)
    assert llm.default_params(top_p=0.5) == SamplingParams(temperature=0.2, top_p=0.5)
    assert ["default sampling", "temperature 0.2, top_p 0.9", "recommended by the checkpoint"] in llm.info.decisions
    assert LLM(max_model_len=64, generation_config="none").default_params() == SamplingParams()
