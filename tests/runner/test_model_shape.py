import json
import logging
from pathlib import Path

import cpu_logits
import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.runner.model_shape import model_shape
from chairlift.runner.weights import SafetensorWeights


def tied(directory: Path) -> bool:
    return bool(model_shape(directory, in_torch=False, load_format="auto").tie_word_embeddings)


def test_an_output_matrix_of_its_own_wins_over_the_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_models.write("llama", tmp_path)  # its config.json says that embeddings are tied
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert tied(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert tied(tmp_path)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, file)
    with caplog.at_level(logging.WARNING):
        assert not tied(tmp_path)
    assert "lm_head.weight differs from the embeddings and is used" in caplog.text


def test_tied_embeddings_may_have_the_name_of_the_output_matrix(tmp_path: Path) -> None:
    """As safetensors.torch.save_model keeps the first of two names."""
    model = tiny_models.write("llama", tmp_path)
    expected = cpu_logits.logits(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    shape = model_shape(tmp_path, in_torch=False, load_format="auto")
    assert isinstance(shape, ModelConfig)
    assert (shape.tie_word_embeddings, shape.embedding) == (True, "lm_head")
    assert np.array_equal(cpu_logits.logits(tmp_path, shape=shape), expected)
    with torch.no_grad():
        theirs = type(model).from_pretrained(tmp_path)(torch.tensor([[7, 14]])).logits - model(torch.tensor([[7, 14]])).logits
    assert theirs.abs().max() < 1e-5
    tensors.pop("lm_head.weight")
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match=r"no tensor model\.embed_tokens\.weight"):
        cpu_logits.logits(tmp_path)


def test_no_tensor_may_be_in_two_files(tmp_path: Path) -> None:
    tiny_models.write("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    (tmp_path / "model-2.safetensors").write_bytes((tmp_path / "model-1.safetensors").read_bytes())
    with pytest.raises(UnsupportedModel, match=r"model-2\.safetensors and model-1\.safetensors both hold tensor"):
        SafetensorWeights(tmp_path)


def test_the_index_decides_between_two_files_with_one_tensor(tmp_path: Path) -> None:
    tiny_models.write("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] + 1}, tmp_path / "model-2.safetensors")
    for number in (1, 2):
        listed = dict.fromkeys(tensors, "model-1.safetensors") | {"model.norm.weight": f"model-{number}.safetensors"}
        listed |= {"missing": "model-2.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        norm = SafetensorWeights(tmp_path).take("model.norm.weight", *tensors["model.norm.weight"].shape)
        assert (norm == (tensors["model.norm.weight"] + (number - 1)).numpy()).all()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    with pytest.raises(UnsupportedModel, match="both hold tensor"):
        SafetensorWeights(tmp_path)
