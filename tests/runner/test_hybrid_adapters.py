"""LoRA adapters on hybrid models and on those with other names: they change attention and MLPs, and other layers are refused by name."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import adapters
import numpy as np
import pytest
import tiny_models
import torch
from cpu_logits import logits
from safetensors.torch import load_file, save_file

from chairlift.checkpoint.adapter import FUSED, MODULES, AdapterFiles
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.models.llama import Llama
from chairlift.runner.adapters import check_shapes
from chairlift.runner.torch_adapters import TorchAdapters

PROJECTION = re.compile(
    r".*layers\.\d+\.(self_attn|mlp|feed_forward|mixer)\.([qkvo]_proj|out_proj|gate_proj|up_proj|down_proj|w[123])\.weight"
)


def updated(model: torch.nn.Module, seed: int = 0) -> dict[str, np.ndarray]:
    """A and B for the projections of attention and MLPs, by their names in a checkpoint. Adds their product to the model's weights."""
    rng, tensors = np.random.default_rng(seed), {}
    recurrent = {name.rpartition(".")[0] for name, _ in model.named_parameters() if name.endswith("mixer.dt_bias")}
    for name, weight in model.named_parameters():
        place = name.removesuffix(".weight")
        if PROJECTION.fullmatch(name) and place.rpartition(".")[0] not in recurrent:
            a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((4, weight.shape[1]), (weight.shape[0], 4)))
            tensors |= {f"{place}.lora_A": a, f"{place}.lora_B": b}
            weight.data += torch.from_numpy(2 * (b @ a))
    return tensors


@pytest.mark.parametrize(("name", "modules"), [("qwen3.5", 7), ("lfm2", 7), ("granite4-hybrid", 4), ("nemotron-h", 6), ("opt", 4)])
def test_logits_are_those_of_merged_weights(tmp_path: Path, name: str, modules: int) -> None:
    model = tiny_models.write(name, tmp_path / "base")
    tensors = updated(model)
    assert len({place.split(".")[-2] for place in tensors}) == modules
    tiny_models.write(name, tmp_path / "merged")
    model.save_pretrained(tmp_path / "merged")
    adapter = AdapterFiles(adapters.write(tmp_path / "adapter", tensors))
    plain, found, expected = (logits(tmp_path / "base"), logits(tmp_path / "base", adapter=adapter), logits(tmp_path / "merged"))
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() <= 1e-4 * scale < 0.1 * np.abs(found - plain).max()


@pytest.mark.parametrize(
    ("name", "module", "reason"),
    [
        ("qwen3.5", "0.linear_attn.out_proj", f"it changes .*0.linear_attn.out_proj.*: only {', '.join(MODULES + FUSED)} can"),
        ("lfm2", "0.conv.in_proj", "it changes .*layers.0.conv.in_proj"),
        ("qwen3.5", "0.self_attn.q_proj", "it changes q_proj of layer 0 of Qwen3_5ForCausalLM, which has no attention"),
        ("nemotron-h", "0.mixer.up_proj", "it changes up_proj of layer 0 of NemotronHForCausalLM, which has no MLP"),
        ("nemotron-h", "1.mixer.gate_proj", "it changes gate_proj of layer 1 of NemotronHForCausalLM, whose MLP has no gate"),
        ("granite4-hybrid", "1.mlp.gate_proj", "GraniteMoeHybridForCausalLM has fused projections"),
        ("qwen3.5", "1.self_attn.q_proj", "q_proj of layer 1 is 4x4, and the model's is "),
    ],
)
def test_what_a_layer_does_not_have_is_refused_by_name(tmp_path: Path, name: str, module: str, reason: str) -> None:
    tiny_models.write(name, tmp_path / "base")
    place = f"model.layers.{module}"
    tensors = {f"{place}.lora_A": np.ones((4, 4), np.float32), f"{place}.lora_B": np.ones((4, 4), np.float32)}
    with pytest.raises(UnsupportedModel, match=reason):
        check_shapes(AdapterFiles(adapters.write(tmp_path / "adapter", tensors)), ModelConfig.load(tmp_path / "base"))


def test_in_torch_a_hybrid_model_takes_no_adapter(tmp_path: Path) -> None:
    model = tiny_models.write("qwen3.5", tmp_path / "base")
    adapter = AdapterFiles(adapters.write(tmp_path / "adapter", updated(model)))
    shape = ModelConfig.load(tmp_path / "base")
    check_shapes(adapter, shape)
    with pytest.raises(UnsupportedModel, match="has recurrent layers: in torch it takes no adapters"):
        TorchAdapters(cast(Llama, None), shape, torch.device("cpu")).pack(adapter)


def test_matrices_that_the_weights_have_fused_are_not_changed_by_themselves(tmp_path: Path) -> None:
    model = tiny_models.write("phi", tmp_path / "base")
    tensors = {name: pair for name, pair in updated(model).items() if "1.self_attn.v_proj" in name}
    adapter = AdapterFiles(adapters.write(tmp_path / "adapter", tensors))
    path, shape = tmp_path / "base" / "model.safetensors", ModelConfig.load(tmp_path / "base")
    weights = load_file(path)
    for layer, kind in itertools.product(range(shape.num_layers), ("weight", "bias")):
        name = f"model.layers.{layer}.self_attn.{{}}_proj.{kind}"
        weights[name.format("qkv")] = torch.cat([weights.pop(name.format(part)) for part in "qkv"])
    save_file(weights, path)
    with pytest.raises(UnsupportedModel, match="changes matrices that these weights do not have by themselves"):
        logits(tmp_path / "base", adapter=adapter)
    network = cast(Llama, SimpleNamespace(layers=[SimpleNamespace(projections={})] * shape.num_layers))
    with pytest.raises(UnsupportedModel, match="it changes v_proj of layer 1, which these weights do not have by itself"):
        TorchAdapters(network, shape, torch.device("cpu")).pack(adapter)
