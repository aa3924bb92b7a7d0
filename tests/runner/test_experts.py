"""Mixtures of experts whose numbers or tensors do not fit each other are refused before anything is served."""

import json
from pathlib import Path
from typing import Any

import adapters
import numpy as np
import pytest
import torch
from cpu_logits import IN_FP32, logits
from gguf_files import EXPERTS, gguf_of, tiny_model
from quantised_checkpoints import quantise_checkpoint
from runner_steps import Driver
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, IN_TORCH, write

from chairlift.checkpoint.adapter import AdapterFiles
from chairlift.checkpoint.gguf import convert
from chairlift.config import EngineConfig
from chairlift.errors import UnsupportedModel
from chairlift.models import mixture
from chairlift.models.config import ModelConfig
from chairlift.models.fields import NoNativeModel, read_json
from chairlift.runner import expert_weights
from chairlift.runner.adapters import check_shapes
from chairlift.runner.build import build_runner
from chairlift.runner.cpu_executor import CpuExecutor
from chairlift.runner.memory.precision import Precision
from chairlift.runner.weights import DummyWeights, open_weights


def torch_logits(directory: Path) -> torch.Tensor:
    """The logits after each of a few tokens, in torch."""
    settings = {"device": "cpu", "runner": "torch", "dtype": "float32", "num_kv_blocks": 5, "block_size": 16, "max_num_seqs": 1}
    runner = build_runner(EngineConfig(**settings, max_num_batched_tokens=16), directory)
    driver = Driver(runner)
    riding = driver.add_request(0, (np.arange(11) * 7 % 30).tolist())
    for _ in range(3):
        driver.step([(riding, len(riding.tokens) - riding.computed)])
    return torch.stack(riding.logits)


PLAIN = Precision("float32", "none", "float32")


def load(directory: Path) -> None:
    config = EngineConfig(device="cpu", threads=1)
    CpuExecutor.load(config, open_weights(config, directory), ModelConfig.load(directory), PLAIN)


def convert_and_load(path: Path) -> None:
    convert(path, path.with_suffix(""))
    load(path.with_suffix(""))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_experts_per_tok": 12}, "num_experts_per_tok is 12, and there are 11 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer, got 0"),
        ({"num_local_experts": "8"}, "num_local_experts must be a positive integer, got '8'"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be a positive integer, got None"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers must be numbers of the 3 layers, got \[3\]"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, got 0"),
    ],
)
def test_a_config_whose_numbers_of_experts_do_not_fit_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    write("qwen3-moe", tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        ModelConfig.parse(read_json(tmp_path) | settings)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clipped queries, keys and values"),
        ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 9}, "sliding windows in Qwen2MoeForCausalLM"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 9}, "sliding windows in Qwen3MoeForCausalLM"),
    ],
)
def test_what_changes_the_attention_of_mixtures_is_left_to_transformers(
    tmp_path: Path, name: str, settings: dict[str, Any], reason: str
) -> None:
    write(name, tmp_path)
    raw = read_json(tmp_path)
    assert ModelConfig.parse(raw | dict.fromkeys(settings)).windows == (None,) * raw["num_hidden_layers"]
    with pytest.raises(NoNativeModel, match=f"{reason} have no code of ours"):
        ModelConfig.parse(raw | settings)


def test_random_experts_are_not_all_zero(tmp_path: Path) -> None:
    write("gpt-oss", tmp_path)
    experts = ModelConfig.load(tmp_path).experts
    assert experts is not None
    gates, ups = expert_weights.gate_and_up(DummyWeights(0), experts, "model.layers.0.", 48)
    for kind, _, data, _ in [*gates, *ups, *expert_weights.down(DummyWeights(0), experts, "model.layers.0.", 48)]:
        assert kind == "float32"
        assert isinstance(data, np.ndarray)
        assert data.view(np.float32).std() > 0.05


def test_memory_is_planned_for_a_shared_expert_that_is_wider_than_the_others(tmp_path: Path) -> None:
    write("granite-moe-shared", tmp_path)
    assert ModelConfig.parse(read_json(tmp_path) | {"shared_intermediate_size": 1024}).widest == 1024


@pytest.mark.parametrize("name", ["qwen3-moe", "granite-moe-shared", "gpt-oss", "gemma4-moe"])
def test_memory_is_planned_for_all_experts_and_for_those_of_a_token(tmp_path: Path, name: str) -> None:
    parameters = sum(parameter.numel() for parameter in write(name, tmp_path).parameters())
    model = ModelConfig.load(tmp_path)
    assert model.num_weights == pytest.approx(parameters, rel=0.02), "biases and norms of heads are not counted"
    assert model.widest == max(model.intermediate_size, 3 * 48)


@pytest.mark.parametrize("name", ["router.scale", "router.per_expert_scale", "post_feedforward_layernorm_1.weight", "router.proj.weight"])
def test_a_layer_without_what_gemma_4_has_for_its_experts_is_refused(tmp_path: Path, name: str) -> None:
    write("gemma4-moe", tmp_path)
    path, missing = tmp_path / "model.safetensors", f"model.layers.1.{name}"
    whole = load_file(path)
    save_file({name: tensor for name, tensor in whole.items() if name != missing}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"has no tensor {missing}"):
        load(tmp_path)


RENAMED = ["mixtral", "minimax-m2", "ernie4.5-moe", "exaone-moe", "granite-moe", "lfm2-moe", "nemotron-h-moe"]


@pytest.mark.parametrize("name", RENAMED)
def test_checkpoints_may_have_the_names_that_transformers_gives_tensors(tmp_path: Path, name: str) -> None:
    write(name, tmp_path / "published")
    write(name, tmp_path / "saved", save_original_format=False)
    load(tmp_path / "saved")
    np.testing.assert_array_equal(logits(tmp_path / "saved"), logits(tmp_path / "published"))
    if name in IN_TORCH:
        assert torch.equal(torch_logits(tmp_path / "saved"), torch_logits(tmp_path / "published"))


def test_experts_that_are_missing_or_of_another_shape_or_never_chosen_are_refused(tmp_path: Path) -> None:
    write("qwen3-moe", tmp_path)
    path, experts = tmp_path / "model.safetensors", "model.layers.0.mlp.experts"
    whole = load_file(path)

    def refused(changed: dict[str, torch.Tensor], reason: str, without: str = "") -> None:
        save_file({name: tensor for name, tensor in (whole | changed).items() if name != without}, path, metadata={"format": "pt"})
        with pytest.raises(UnsupportedModel, match=reason):
            load(tmp_path)

    refused({}, "has no tensor model.layers.0.mlp.experts.7.up_proj.weight", f"{experts}.7.up_proj.weight")
    refused(
        {f"{experts}.3.down_proj.weight": torch.zeros(48, 41)}, r"experts.3.down_proj.weight is \[48, 41\] where .* asks for \[48, 40\]"
    )
    refused(
        {f"{experts}.11.up_proj.weight": torch.zeros(40, 48)}, "tensors that its config.json does not account for: .*experts.11.up_proj"
    )
    refused({"model.layers.3.self_attn.k_proj.weight": torch.zeros(16, 48)}, "does not account for: model.layers.3.self_attn.k_proj.weight")
    refused({"model.layers.0.mlp.gate.weight": torch.full((11, 48), torch.nan)}, "layers.0.mlp.gate.weight has numbers that are not finite")
    refused({"model.layers.2.mlp.gate.weight": torch.zeros(12, 48)}, r"layers.2.mlp.gate.weight is \[12, 48\] where .* asks for \[11, 48\]")


@pytest.mark.parametrize("matrix", ["gate", "shared_expert_gate"])
def test_torch_names_the_matrix_of_a_router_that_is_not_finite(tmp_path: Path, matrix: str) -> None:
    write("qwen2-moe", tmp_path)
    path, name = tmp_path / "model.safetensors", f"model.layers.0.mlp.{matrix}.weight"
    whole = load_file(path)
    save_file(whole | {name: torch.full_like(whole[name], torch.inf)}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"tensor {name} has numbers that are not finite"):
        torch_logits(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"expert_count": 10}, r"experts.gate_proj.weight is \[11, 32, 64\] where the configuration asks for \[10, 32, 64\]"),
        ({"expert_used_count": 12}, "num_experts_per_tok is 12, and there are 11 experts"),
        ({"expert_used_count": [3, 3, 3]}, r"expert_used_count must be one positive number for all 2 layers, got \[3, 3, 3\]"),
        ({"expert_used_count": [3, 2]}, r"expert_used_count must be one positive number for all 2 layers, got \[3, 2\]"),
        ({"expert_feed_forward_length": 64}, r"experts.gate_proj.weight is \[11, 32, 64\] where the configuration asks for \[11, 64, 64\]"),
        ({"expert_count": None}, "has no qwen3moe.expert_count"),
        ({"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale is 2.5, which the code for this architecture cannot compute"),
    ],
)
def test_a_file_whose_experts_do_not_fit_its_metadata_is_refused(tmp_path: Path, metadata: dict[str, Any], reason: str) -> None:
    replaced = {f"qwen3moe.{key}": value for key, value in metadata.items()}
    gguf_of(tiny_model("qwen3_moe", **EXPERTS), tmp_path / "tiny.gguf", replaced=replaced)
    with pytest.raises(UnsupportedModel, match=reason):
        convert_and_load(tmp_path / "tiny.gguf")


def test_a_file_whose_router_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", **EXPERTS)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.gate.weight")[2, 5] = torch.nan
    gguf_of(model, tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.gate\.weight has numbers that are not finite"):
        convert_and_load(tmp_path / "tiny.gguf")


def logits_as_a_device_keeps_them(directory: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The logits in torch with experts that are kept quantised, as on a GPU."""
    kept = []
    with monkeypatch.context() as patch:
        patch.setattr(mixture, "_keeps", lambda numbers: kept.append(numbers.dtype) or True)
        found = torch_logits(directory)
    assert kept
    return found


def write_quantised(directory: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES["qwen3-moe"][1], "moe_intermediate_size", 48)  # whole groups
    write("qwen3-moe", directory / "whole")
    quantise_checkpoint(directory / "whole", directory / "packed", form)


@pytest.mark.parametrize("form", ["gptq", "gptq, desc_act", "awq", "packed by row", "fp8 in blocks", "floats by row", "modelopt"])
def test_quantised_experts_give_the_same_logits_kept_and_multiplied_out(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_quantised(tmp_path, form, monkeypatch)
    expected = torch_logits(tmp_path / "whole")
    assert torch.allclose(logits_as_a_device_keeps_them(tmp_path / "packed", monkeypatch), expected, rtol=1e-3, atol=1e-4)
    assert ModelConfig.load(tmp_path / "packed").expert_mlps == 22


def test_experts_that_are_quantised_in_different_ways_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_quantised(tmp_path, "fp8 in blocks", monkeypatch)
    path, name = tmp_path / "packed" / "model.safetensors", "model.layers.0.mlp.experts.3.up_proj.weight"
    whole = {key: tensor for key, tensor in load_file(path).items() if key != f"{name}_scale_inv"}
    save_file(whole | {name: torch.zeros(48, 48)}, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"experts of model\.layers\.0\..* are quantised in different ways"):
        logits_as_a_device_keeps_them(tmp_path / "packed", monkeypatch)


def test_experts_in_mxfp4_are_computed_with_as_the_safetensors_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are those of the same weights in float32, bit for bit where products are in float32."""
    model = tiny_model("gpt_oss", num_local_experts=5, num_experts_per_tok=2, head_dim=16)
    model.save_pretrained(tmp_path / "whole")
    whole, random = load_file(tmp_path / "whole" / "model.safetensors"), torch.Generator().manual_seed(1)
    packed = {name: tensor for name, tensor in whole.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    for name in whole.keys() - packed.keys():
        count, ins, outs = whole[name].shape
        blocks = torch.randint(0, 256, (count, outs, ins // 32, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(119, 125, (count, outs, ins // 32), dtype=torch.uint8, generator=random)
        pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1).flatten(-2)
        whole[name] = (pairs * 2.0 ** (scales[..., None].float() - 127)).flatten(-2).transpose(1, 2).contiguous()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(whole, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "packed").mkdir()
    save_file(packed, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    raw = read_json(tmp_path / "whole") | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(raw))
    weights = open_weights(EngineConfig(device="cpu"), tmp_path / "packed")
    assert weights.sizes() == ((tmp_path / "packed" / "model.safetensors").stat().st_size, 0)
    in_torch = [torch_logits(tmp_path / name) for name in ("whole", "packed")]
    assert torch.equal(*in_torch)
    assert torch.equal(logits_as_a_device_keeps_them(tmp_path / "packed", monkeypatch), in_torch[0])
    expected = logits(tmp_path / "whole", config=IN_FP32)
    np.testing.assert_array_equal(logits(tmp_path / "packed", config=IN_FP32), expected)
    assert np.abs(logits(tmp_path / "packed") - expected).max() <= 1e-5 * np.abs(expected).max()
    save_file(
        {**packed, f"{name}_scales": scales[:, 1:].contiguous()}, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(UnsupportedModel, match=r"_scales is \[5, .* where config.json asks for \[5, "):
        logits(tmp_path / "packed")


def test_adapters_change_the_attention_of_layers_with_experts_and_not_the_experts(tmp_path: Path) -> None:
    write("qwen3-moe", tmp_path)
    model = ModelConfig.load(tmp_path)

    def adapter(layer: int, module: str, outs: int) -> AdapterFiles:
        name = f"model.layers.{layer}.{module}"
        tensors = {f"{name}.lora_A": np.ones((4, 48), np.float32), f"{name}.lora_B": np.ones((outs, 4), np.float32)}
        return AdapterFiles(adapters.write(tmp_path / f"{layer}-{module}", tensors))

    check_shapes(adapter(0, "self_attn.q_proj", 96), model)
    check_shapes(adapter(1, "mlp.up_proj", 80), model)  # the layer without experts
    with pytest.raises(UnsupportedModel, match="layer 0 of Qwen3MoeForCausalLM has experts, which adapters cannot change"):
        check_shapes(adapter(0, "mlp.up_proj", 80), model)


def test_a_file_may_say_the_same_number_for_each_layer(tmp_path: Path) -> None:
    gguf_of(tiny_model("qwen3_moe", **EXPERTS), tmp_path / "tiny.gguf", replaced={"qwen3moe.expert_used_count": [3, 3]})
    convert_and_load(tmp_path / "tiny.gguf")
