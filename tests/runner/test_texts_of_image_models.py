"""The text of models that also read images, and models under the names of other classes."""

import json
from pathlib import Path
from typing import Any

import cpu_logits
import numpy as np
import pytest
import torch
import transformers
from gguf_files import EXPERTS
from safetensors.torch import load_file, save_file
from tiny_models import IMAGE_MODELS, SHAPE

from chairlift.architectures import ALIASES
from chairlift.models.config import ModelConfig

IDS = torch.arange(11)[None] * 7


def write(name: str, directory: Path) -> np.ndarray:
    """Writes the model of a name, and returns the logits of some tokens."""
    class_name, text, vision = IMAGE_MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(text_config=SHAPE | text, vision_config=vision, tie_word_embeddings=False)).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=0.0 if parameter_name.endswith("bias") else 1.0, std=0.2)
        if "q_norm" in parameter_name and class_name.startswith("Gemma4"):  # whose scores are not divided by the size of a head
            parameter.data /= 4
    model.save_pretrained(directory)
    with torch.no_grad():
        logits: np.ndarray = model(input_ids=IDS).logits[0].numpy()
    return logits


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_logits_of_texts(tmp_path: Path, name: str) -> None:
    expected = write(name, tmp_path)
    assert np.ptp(expected) > 0.9
    assert np.abs(cpu_logits.logits(tmp_path) - expected).max() < 1e-5


@pytest.mark.parametrize("inner", [SHAPE["hidden_size"] // 2, SHAPE["hidden_size"], 48])
def test_both_layouts_of_experts_of_qwen3_vl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: int) -> None:
    """The published one is the transposed one of what transformers 5 saves. The shape of one matrix alone may not tell."""
    class_name, text, vision = IMAGE_MODELS["Qwen3-VL-MoE"]
    monkeypatch.setitem(IMAGE_MODELS, "Qwen3-VL-MoE", (class_name, text | {"moe_intermediate_size": inner}, vision))
    expected, path = write("Qwen3-VL-MoE", tmp_path), tmp_path / "model.safetensors"
    assert np.abs(cpu_logits.logits(tmp_path) - expected).max() < 1e-5
    save_file({name: one.mT.contiguous() if "mlp.experts" in name else one for name, one in load_file(path).items()}, path)
    assert np.abs(cpu_logits.logits(tmp_path) - expected).max() < 1e-5


def test_the_first_configurations_of_qwen2_vl(tmp_path: Path) -> None:
    """They have no text_config, and the names of tensors do not tell the parts of the model."""
    expected = write("Qwen2-VL", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    flat = {key: value for key, value in raw.pop("text_config").items() if key not in ("rope_parameters", "model_type")}
    flat |= {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    (tmp_path / "config.json").write_text(json.dumps(flat | raw))
    tensors = load_file(tmp_path / "model.safetensors").items()
    renamed = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value for name, value in tensors}
    assert any(name.startswith("visual.") for name in renamed)
    save_file(renamed, tmp_path / "model.safetensors")
    assert np.abs(cpu_logits.logits(tmp_path) - expected).max() < 1e-5


def test_a_part_for_text_may_leave_out_what_is_usual() -> None:
    raw: dict[str, Any] = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama", "vocab_size": 32064}}
    config = ModelConfig.parse(raw)
    assert (config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads) == (4096, 11008, 32, 32)
    usual = transformers.LlamaConfig()
    assert (usual.hidden_size, usual.intermediate_size, usual.num_hidden_layers, usual.num_attention_heads) == (4096, 11008, 32, 32)


@pytest.mark.parametrize("alias", ALIASES)
def test_other_classes_that_compute_the_same(alias: str) -> None:
    known = ALIASES[alias]
    raw = {**SHAPE, "head_dim": 16, "sliding_window": 9, "rope_theta": 500.0, "rms_norm_eps": 1e-5}
    if known.mixture:
        raw |= EXPERTS
    assert ModelConfig.parse(raw | {"architectures": [alias]}) == ModelConfig.parse(raw | {"architectures": [known.name]})


def test_mimo_has_tensors_beyond_the_next_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE))
    model.save_pretrained(tmp_path)
    expected = cpu_logits.logits(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.mtp_layers.0.input_proj.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert np.array_equal(cpu_logits.logits(tmp_path), expected)
