"""What clients see of a checkpoint."""

import json

import gguf
import gguf_files
import pytest
import tiny_models

from chairlift.checkpoint.locate import locate
from chairlift.engine.fingerprint import checkpoint_digest
from chairlift.models.config import load_shape
from chairlift.runner.description import checkpoint_info, describe


def info(directory):
    return checkpoint_info(directory, load_shape(directory))


def test_info_of_safetensors(tmp_path):
    model = tiny_models.write("llama", tmp_path)
    known = info(tmp_path)
    assert known.architecture == "LlamaForCausalLM"
    assert known.num_weights == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=0.02)
    assert (known.weight_format, known.weight_type) == ("safetensors", "F32")
    assert known.weight_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert "not used" not in describe(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"depth_of_thought": 3}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"split_special_tokens": True, "image_token": "<image>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"presence_penalty": 1.5, "top_k": 5}))
    unused = "depth_of_thought, presence_penalty of generation_config.json, split_special_tokens of tokenizer_config.json"
    assert describe(tmp_path)["not used"] == unused
    digest = checkpoint_digest(tmp_path)
    assert (len(digest), checkpoint_digest(tmp_path)) == (64, digest)
    (tmp_path / "model.safetensors").unlink()
    assert (info(tmp_path).weight_type, info(tmp_path).weight_bytes) == ("", 0)
    assert checkpoint_digest(tmp_path) != digest


def test_info_of_a_gguf_file(tmp_path):
    gguf_files.gguf_of(gguf_files.tiny_model("qwen2"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    directory = locate(str(tmp_path / "tiny.gguf"), directory=str(tmp_path / "cache"), progress=False)
    known = info(directory)
    assert (known.weight_format, known.weight_type, known.architecture) == ("gguf", "Q8_0", "Qwen2ForCausalLM")
    assert known.weight_bytes == (tmp_path / "tiny.gguf").stat().st_size
