"""Decoders that were made for embeddings, against transformers: without a head, with any pooling, or with attention to later tokens."""

import json
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import tiny_encoders
import torch

from chairlift import LLM
from chairlift.errors import InvalidRequest, UnsupportedModel
from chairlift.models.config import ModelConfig, load_shape
from chairlift.models.encoder import EncoderConfig
from chairlift.runner.description import describe

TEXTS = [np.random.default_rng(length).integers(4, 56, length).tolist() for length in (3, tiny_encoders.LONGEST, 1, 17, 26)]
GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 128}
GEMMA = {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
LAST = {
    "Qwen3": {**GROUPED, "head_dim": 16},
    "Mistral": {**GROUPED, "sliding_window": 7, "head_dim": 16},
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Gemma2": GEMMA,
    "Gemma3Text": GEMMA | {"use_bidirectional_attention": False},
}


def write(directory: Path, family: str, pooling: str | None, changes: dict[str, Any], **settings: Any) -> torch.nn.Module:
    """Writes a model without a head; `changes` are other values of config.json, which the returned model has too."""
    oracle = tiny_encoders.write(family, directory, pooling, attn_implementation="eager", **settings)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    for name, value in changes.items():
        setattr(oracle.config, name, value)
    return oracle


def check(directory: Path, oracle: torch.nn.Module, pooling: str) -> None:
    """Compares embeddings with the oracle's, alone and in company, and sees that no text is generated."""
    expected = np.stack([tiny_encoders.embed(oracle, text, pooling).numpy() for text in TEXTS])
    with LLM(directory, threads=2) as llm:
        embeddings = llm.embed(TEXTS)
        assert np.abs(embeddings - expected).max() < 1e-5
        assert np.array_equal(np.concatenate([llm.embed(text) for text in TEXTS]), embeddings)
        assert not llm.info.generates
        with pytest.raises(InvalidRequest, match="computes embeddings and generates no text"):
            llm.generate("abc")
    assert describe(directory)["answers"] == "embeddings"


@pytest.mark.parametrize("family", LAST)
@pytest.mark.parametrize("pooling", [None, "lasttoken"])
def test_a_decoder_without_a_head_gives_the_last_state(tmp_path: Path, family: str, pooling: str | None) -> None:
    oracle = write(tmp_path, family, pooling, {}, **LAST[family], dense={})
    assert EncoderConfig.find(tmp_path) is None  # computed in chunks, with a prefix cache
    check(tmp_path, oracle, "last")


POOLED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a mean of states": ("Llama", "mean", {}),
    "the first state, which sees no other": ("Qwen3", "first", {}),
    "a mean with windows": ("Mistral", "mean", {}),
    "a mean of two kinds of windows": ("Gemma3Text", "mean", {}),
    "attention to later tokens": ("Qwen2", "last", {"is_causal": False}),
    "attention to later tokens, with a head's name": ("Qwen3", "mean", {"is_causal": False, "architectures": ["Qwen3ForCausalLM"]}),
    "NVIDIA's class": ("Llama", "mean", {"is_causal": False, "architectures": ["LlamaBidirectionalModel"]}),
    "EuroBERT": ("EuroBert", "mean", {}),
}


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("dense", [{}, {"2_Dense": (48, 32)}])
def test_other_poolings_and_attention_to_later_tokens(tmp_path: Path, name: str, dense: dict[str, tuple[int, int]]) -> None:
    family, pooling, changes = POOLED[name]
    written = {"mean": "mean_tokens", "first": "cls_token", "last": "lasttoken"}[pooling]
    oracle = write(tmp_path, family, written, changes, **LAST.get(family, GROUPED), dense=dense)
    if name == "NVIDIA's class":  # whose name alone says it
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "is_causal"}))
    check(tmp_path, oracle, pooling)
    with torch.no_grad():
        ahead = (
            oracle(input_ids=torch.tensor([TEXTS[0]])).last_hidden_state[0, 0]
            - oracle(input_ids=torch.tensor([TEXTS[0][:1]])).last_hidden_state[0, 0]
        )
    assert (ahead.abs().max() > 1e-3) == (family == "EuroBert" or getattr(oracle.config, "is_causal", None) is False)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_mean_of_a_gguf_file(tmp_path: Path, kind: str) -> None:
    model = gguf_files.tiny_model(kind)
    gguf_files.gguf_of(model, tmp_path / "file.gguf", replaced={f"{kind}.pooling_type": 1})
    with torch.no_grad():
        states = [model.model(input_ids=torch.tensor([text])).last_hidden_state[0].mean(0) for text in TEXTS]
    with LLM(tmp_path / "file.gguf", threads=2) as llm:
        assert np.abs(llm.embed(TEXTS) - torch.stack([state / state.norm() for state in states]).numpy()).max() < 1e-5
        assert not llm.info.generates


def test_layers_after_the_last_state(tmp_path: Path) -> None:
    oracle = write(tmp_path, "Qwen3", "lasttoken", {}, **LAST["Qwen3"], dense={"2_Dense": (48, 24)})
    check(tmp_path, oracle, "last")


REFUSED = {
    "windows": ("Mistral", {"is_causal": False}, "with windows and attention to later tokens"),
    "biases": ("Llama", {"is_causal": False, "attention_bias": True}, "with biases of attention's output"),
    "caps": ("Gemma2", {"is_causal": False, "attn_logit_softcapping": 5.0}, "with capped attention scores"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_there_is_no_code_for_is_refused_by_name(tmp_path: Path, name: str) -> None:
    family, changes, message = REFUSED[name]
    write(tmp_path, family, "mean_tokens", changes, **LAST[family], dense={})
    with pytest.raises(UnsupportedModel, match=message):
        LLM(tmp_path, threads=1)


def test_a_decoder_that_sees_later_tokens_never_generates(tmp_path: Path) -> None:
    """Computed as usual, its answers would be wrong and nobody would know."""
    write(tmp_path, "Qwen2", None, {"is_causal": False, "architectures": ["Qwen2ForCausalLM"]}, **LAST["Qwen2"], dense={})
    with pytest.raises(UnsupportedModel, match="later tokens"):
        ModelConfig.load(tmp_path)
    with pytest.raises(UnsupportedModel, match="later tokens"):
        load_shape(tmp_path)  # transformers' code neither


def test_decoders_without_a_head_run_on_a_cpu_alone(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3", None, {}, **LAST["Qwen3"], dense={})
    with pytest.raises(UnsupportedModel, match="on a CPU alone"):
        load_shape(tmp_path, in_torch=True)
