"""Weights, keys and values in 8 bits, in torch: the models are a little less exact, and not otherwise."""

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from runner_steps import Driver
from safetensors.torch import load_file, save_file
from tiny_models import write

from chairlift.config import EngineConfig
from chairlift.errors import UnsupportedModel
from chairlift.layers.linear import Quantised, Weight, dequantise, quantise
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.models.config import ModelConfig
from chairlift.runner.build import build_runner
from chairlift.runner.executor import Loader
from chairlift.runner.memory.precision import Precision, torch_weight_bytes
from chairlift.runner.tensor_parallel.shards import Shards
from chairlift.runner.torch_backend import TorchBackend
from chairlift.runner.torch_executor import TorchExecutor
from chairlift.runner.torch_weights import TorchDummyWeights, TorchWeights
from chairlift.runner.weights import DummyWeights, SafetensorWeights

pytestmark = pytest.mark.slow

SMALL = {"device": "cpu", "num_kv_blocks": 80, "block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8}
LENGTHS = (37, 5, 18)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def with_changes(**changes: str) -> Loader:
    """Loads a model in torch with another precision than the settings ask for, which a CPU would not be given."""
    return lambda config, directory, model, precision: TorchExecutor.load(config, directory, model, replace(precision, **changes))


def logits(directory: Path, load: Loader, **settings: object) -> tuple[torch.Tensor, TorchExecutor]:
    """What a model says after each of some prompts, cut in two, and after three more tokens that are always the same; and the model."""
    runner = build_runner(EngineConfig(**SMALL | settings), directory, make_backend=partial(TorchBackend, load=load))
    driver = Driver(runner)
    ridings = [
        driver.add_request(row, np.random.default_rng(row).integers(0, 199, length + 3).tolist()) for row, length in enumerate(LENGTHS)
    ]
    whole = [riding.tokens for riding in ridings]
    for riding, length in zip(ridings, LENGTHS, strict=True):
        riding.tokens = riding.tokens[:length]
    driver.step([(riding, 4) for riding in ridings])
    driver.step([(riding, length - 4) for riding, length in zip(ridings, LENGTHS, strict=True)])
    for step in range(3):
        for riding, tokens, length in zip(ridings, whole, LENGTHS, strict=True):
            riding.tokens = tokens[: length + step + 1]
        driver.step([(riding, 1) for riding in ridings])
    return torch.cat([torch.stack(riding.logits) for riding in ridings]), runner.model


def rounded(directory: Path, form: str) -> None:
    """Rounds the matrices of a checkpoint's layers to 8 bits."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.removesuffix(".weight").endswith(PROJECTIONS):
            numbers, scale, *_ = quantise(tensor, form)
            tensors[name] = numbers.float() * scale
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("name", ["llama-biased", "gemma3"])
def test_int8_is_the_model_with_its_weights_rounded(name, tmp_path):
    write(name, tmp_path)
    whole, _ = logits(tmp_path, TorchExecutor.load)
    found, _ = logits(tmp_path, with_changes(quantization="int8"))
    error = (found - whole).norm(dim=1) / whole.norm(dim=1)
    # Logits are within 8 %, and the likeliest token is another only where the first two were as close.
    assert 1e-4 < error.max() <= 0.08
    top = whole.topk(2).values
    assert ((found.argmax(1) == whole.argmax(1)) | (top[:, 0] - top[:, 1] <= 2 * (found - whole).abs().amax(1))).all()
    assert (found.argmax(1) == whole.argmax(1)).float().mean() >= 0.75
    rounded(tmp_path, "int8")
    same, _ = logits(tmp_path, TorchExecutor.load)
    assert (found - same).abs().max() <= 1e-5 * same.abs().max()


def test_fp8_is_close_too(tmp_path):
    write("qwen3", tmp_path)
    whole, _ = logits(tmp_path, TorchExecutor.load)
    found, _ = logits(tmp_path, with_changes(quantization="fp8"))
    error = (found - whole).norm(dim=1) / whole.norm(dim=1)
    assert 1e-3 < error.max() <= 0.25
    # Activations have their part in it.
    rounded(tmp_path, "fp8")
    weights_alone, _ = logits(tmp_path, TorchExecutor.load)
    assert (found - weights_alone).norm() > 0.2 * (found - whole).norm()


def kept(model: object) -> int:
    """Bytes of all tensors that something holds, each counted once."""
    seen, found, todo = set(), {}, [model]
    while todo:
        at = todo.pop()
        if id(at) in seen or isinstance(at, type):
            continue
        seen.add(id(at))
        if isinstance(at, torch.Tensor):
            found[at.untyped_storage().data_ptr()] = at.untyped_storage().nbytes()
        elif isinstance(at, list | tuple | dict) or type(at).__module__.startswith("chairlift"):
            todo += gc.get_referents(at)
    return sum(found.values())


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_weights_take_as_many_bytes_as_is_told(name, form, tmp_path):
    write(name, tmp_path)
    model = ModelConfig.load(tmp_path)
    compute, quantization = ("bfloat16", form) if form in ("int8", "fp8") else (form, "none")
    config, precision = EngineConfig(device="cpu", load_format="dummy"), Precision(compute, quantization, compute, compute)
    loaded = TorchExecutor.load(config, tmp_path, model, precision)
    frequencies = 4 * model.head_dim // 2
    assert kept(loaded.network) == torch_weight_bytes(model, form, "bfloat16") + frequencies
    # A layer's matrix takes half of what it does in 16 bits, and a scale for each row.
    rows, columns = 2 * model.intermediate_size, model.hidden_size
    each = {"float32": 4 * columns, "bfloat16": 2 * columns}.get(form, columns + 4)
    assert kept(loaded.network.layers[0].feed.gate_up) == rows * each


def loaded(directory: Path, quantization: str) -> torch.nn.Module:
    """The network of a model with random weights in bfloat16, or rounded."""
    config, precision = EngineConfig(device="cpu", load_format="dummy"), Precision("bfloat16", quantization, "bfloat16", "bfloat16")
    return TorchExecutor.load(config, directory, ModelConfig.load(directory), precision).network


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-moe", "deepseek-v3"])
def test_rounding_saves_as_many_bytes_as_is_told(name, tmp_path):
    write(name, tmp_path)
    model = ModelConfig.load(tmp_path)
    whole, packed = (torch_weight_bytes(model, form, packs_experts=True) for form in ("bfloat16", "int8"))
    assert kept(loaded(tmp_path, "none")) - kept(loaded(tmp_path, "int8")) == whole - packed


def test_a_recurrent_layer_may_be_quantised_in_part(tmp_path, monkeypatch):
    write("qwen3.5", tmp_path)
    read = TorchWeights.matrix

    def with_parts(change: Callable[[Quantised], Weight]) -> tuple[torch.Tensor, TorchExecutor]:
        def matrix(self: TorchWeights, layer: str, outs: int, ins: int) -> Weight:
            found = read(self, layer, outs, ins)
            return change(quantise(found, "int8")) if layer.endswith(("in_proj_qkv", "in_proj_z")) else found

        monkeypatch.setattr(TorchWeights, "matrix", matrix)
        return logits(tmp_path, TorchExecutor.load)

    (whole, plain), (found, packed) = with_parts(lambda weight: dequantise(weight, torch.float32)), with_parts(lambda weight: weight)
    assert (found - whole).abs().max() <= 1e-5 * whole.abs().max()
    shape = ModelConfig.load(tmp_path).recurrence
    rows = sum(shape.layers) * (shape.channels + shape.width)
    assert kept(plain.network) - kept(packed.network) == rows * 3 * shape.hidden - rows * 4


def test_a_process_rounds_the_part_that_it_has(tmp_path):
    write("llama-biased", tmp_path)
    model = ModelConfig.load(tmp_path)
    for rank in range(2):
        whole = TorchWeights(SafetensorWeights(tmp_path), torch.float32, torch.device("cpu"))
        part = Shards(whole, TensorParallelGroup(rank, 2)).matrix("model.layers.0.self_attn.o_proj", model.hidden_size, 24)
        there = whole.take("model.layers.0.self_attn.o_proj.weight", model.hidden_size, 48)[:, 24 * rank : 24 * rank + 24]
        assert torch.equal(quantise(part, "int8").scale, there.abs().amax(1, keepdim=True) / 127)


@pytest.fixture
def scaled(tmp_path: Path) -> Callable[[dict[str, torch.Tensor]], Path]:
    """A checkpoint whose keys and values are too large for fp8, with these tensors more."""

    def make(more: dict[str, torch.Tensor]) -> Path:
        write("llama-biased", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        for layer in range(3):
            # Queries are as much smaller, and so is what is made of values: the model is the same.
            for name, factor in (("q", 1 / 1000), ("k", 1000), ("v", 1000)):
                for kind in ("weight", "bias"):
                    tensors[f"model.layers.{layer}.self_attn.{name}_proj.{kind}"] *= factor
            tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] /= 1000
        save_file(tensors | more, tmp_path / "model.safetensors")
        return tmp_path

    return make


NAMES = ("self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{0}_proj.{0}_scale")


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_a_checkpoint_keep_keys_and_values_within_8_bits(name, scaled):
    heads, fp8 = 6, with_changes(kv="fp8")
    whole, _ = logits(scaled({}), TorchExecutor.load)
    clamped, _ = logits(scaled({}), fp8)

    def error(found: torch.Tensor) -> float:
        return ((found - whole).norm() / whole.norm()).item()

    one = {f"model.layers.{layer}.{name.format(kind)}": torch.tensor([40.0]) for layer in range(3) for kind in "kv"}
    found, model = logits(scaled(one), fp8)
    assert error(clamped) > 0.5
    assert error(found) <= 0.15
    assert torch.equal(model.network.layers[1].mixer.scales[0], torch.full((heads,), 40.0))
    # In a cache of another form they mean nothing.
    same, _ = logits(scaled(one), TorchExecutor.load)
    assert torch.equal(same, whole)


def test_models_of_transformers_have_scales_too(scaled):
    one = {f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor(40.0) for layer in range(3) for kind in "kv"}
    found = []
    for more in ({}, one):
        path = scaled(more)
        raw = json.loads((path / "config.json").read_text())
        raw["hidden_act"] = "gelu"  # which the code here lacks
        (path / "config.json").write_text(json.dumps(raw))
        whole, model = logits(path, TorchExecutor.load)
        assert type(model.network).__name__ == "TransformersModel"
        found.append((logits(path, with_changes(kv="fp8"))[0] - whole).norm() / whole.norm())
    clamped, kept = found
    assert clamped > 0.5
    assert kept <= 0.15


def test_scales_may_be_of_each_head_and_of_keys_alone(scaled):
    scales = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    path = scaled({"model.layers.1.self_attn.k_scale": scales.to(torch.bfloat16), "model.layers.2.self_attn.v_scale": torch.tensor(3.0)})
    _, model = logits(path, with_changes(kv="fp8"))
    first, second, third = (layer.mixer.scales for layer in model.network.layers)
    assert first is None
    assert torch.equal(second[0], scales)
    assert torch.equal(second[1], torch.ones(6))
    assert torch.equal(torch.stack(third), torch.tensor([[1.0], [3.0]]).expand(2, 6))
    part = Shards(TorchWeights(SafetensorWeights(path), torch.float32, torch.device("cpu")), TensorParallelGroup(1, 2))
    assert torch.equal(part.scales("model.layers.1.self_attn.k_scale", 3), scales[3:])


@pytest.mark.parametrize("scale", [torch.ones(2), torch.tensor(-1.0), torch.tensor(float("nan"))])
def test_scales_that_are_none_are_refused(scale, scaled):
    with pytest.raises(UnsupportedModel, match=r"model.layers.0.self_attn.k_scale must have a positive number, or one for each of 6 KV"):
        logits(scaled({"model.layers.0.self_attn.k_scale": scale}), TorchExecutor.load)


def test_a_checkpoint_that_quantises_keys_and_values_alone_is_ours(tmp_path):
    write("llama", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    assert ModelConfig.parse(raw).architecture == "LlamaForCausalLM"


def test_random_norms_change_nothing(tmp_path):
    for name in ("llama", "gemma2"):
        write(name, tmp_path / name)
        model = ModelConfig.load(tmp_path / name)
        loaded = TorchExecutor.load(
            EngineConfig(device="cpu", load_format="dummy"), tmp_path / name, model, Precision("float32", "none", "float32")
        )
        for norm in (loaded.network.norm, loaded.network.layers[0].feed.norm, loaded.network.layers[2].mixer.norm):
            assert torch.equal(norm.weight, torch.ones_like(norm.weight))
    dummy = TorchDummyWeights(DummyWeights(0), torch.float32, torch.device("cpu"))
    assert torch.equal(dummy.take("model.norm.weight", 3), torch.ones(3))
