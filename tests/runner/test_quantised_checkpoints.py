"""Checkpoints of 4 and 8 bits, kept packed in torch and multiplied out in Rust: they are the models that they stand for."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from quantised_checkpoints import DOWN, EXPANDED, FORMATS, GROUP, quantise_checkpoint
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, OutOfMemory, UnsupportedModel
from chairlift.layers.linear import Linear, Quantised, dequantise
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.models.config import ModelConfig, load_shape
from chairlift.runner.memory.budget import DeviceBudget
from chairlift.runner.memory.device_memory import Memory
from chairlift.runner.memory.precision import Precision
from chairlift.runner.quantised_matrix import multiply_out
from chairlift.runner.tensor_parallel.shards import Shards
from chairlift.runner.tensor_parallel.split import part_of
from chairlift.runner.torch_executor import TorchExecutor
from chairlift.runner.torch_weights import TorchWeights
from chairlift.runner.weights import SafetensorWeights

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SIZES = {"device": "cpu", "max_model_len": 64, "num_kv_blocks": 40, "block_size": 8, "max_num_seqs": 4}
PROMPTS = [[5], list(range(10, 40)), [7, 9, 7, 9, 7, 9]]
SHAPE = (48, 80)
"""Outputs and inputs of DOWN."""


@pytest.fixture
def make(tmp_path: Path, byte_model: Path):
    """Writes a checkpoint in a format; returns its directory, and that of the model that it stands for."""

    def write(form: str, family: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
        plain, packed = tmp_path / "plain", tmp_path / "packed"
        plain.mkdir()
        tiny_models.write(family, plain, dtype)
        quantise_checkpoint(plain, packed, form)
        for directory in (plain, packed):
            shutil.copy(byte_model / "tokenizer.json", directory)
        return packed, plain

    return write


def matrices(directory: Path) -> SafetensorWeights:
    return SafetensorWeights(directory, ModelConfig.load(directory).scheme)


def in_order(weight: Quantised) -> torch.Tensor:
    """The matrix in the order of its inputs."""
    whole = dequantise(weight, torch.float32)
    return whole if weight.order is None else whole[:, weight.order.argsort()]


@pytest.mark.parametrize("form", FORMATS)
def test_a_matrix_is_that_of_the_format(form, make):
    packed, plain = make(form)
    expected = load_file(plain / "model.safetensors")[f"{DOWN}.weight"]
    found = matrices(packed).matrix(DOWN, *SHAPE)
    assert torch.equal(torch.from_numpy(multiply_out(found)), expected)
    kept = TorchWeights(matrices(packed), torch.float32, torch.device("cpu")).matrix(DOWN, *SHAPE)
    assert torch.equal(in_order(kept), expected)
    # It stays packed: with its scales and zeros it takes less than half of what it would in 16 bits, plus what small groups add.
    scales = kept.scale.nbytes + (0 if kept.zero is None else kept.zero.nbytes)
    assert kept.numbers.nbytes == expected.numel() // (1 if kept.zero is None else 2)
    assert scales <= expected.numel() // GROUP * 4


@pytest.mark.parametrize("form", EXPANDED)
def test_a_matrix_that_is_multiplied_out_is_that_of_the_format(form, make):
    packed, plain = make(form)
    expected = load_file(plain / "model.safetensors")[f"{DOWN}.weight"]
    found = torch.from_numpy(matrices(packed).matrix(DOWN, *SHAPE))
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert ModelConfig.load(packed).only_in_rust


@pytest.mark.parametrize("form", EXPANDED)
def test_rust_answers_as_the_model_that_a_checkpoint_stands_for(form, make):
    packed, plain = make(form, "qwen3")
    expected, found = (
        [output.token_ids for output in LLM(str(directory), dtype="float32", **SIZES).generate(PROMPTS, GREEDY)]
        for directory in (plain, packed)
    )
    assert found == expected


DAMAGED = {
    "nf4": ("weight.quant_state.bitsandbytes__nf4", lambda tensor: torch.tensor(list(b"{}"), dtype=torch.uint8), "KeyError"),
    "nested nf4": ("weight.nested_quant_map", lambda tensor: tensor[:9], r"nested_quant_map is \[9\] where"),
    "nvfp4": ("weight_global_scale", lambda tensor: torch.ones(2), "weight_global_scale is"),
    "int8": ("weight_scale", lambda tensor: tensor[:5], "weight_scale is"),
}


@pytest.mark.parametrize("form", DAMAGED)
def test_damaged_tensors_of_multiplied_out_matrices_are_named(form, make):
    name, damage, message = DAMAGED[form]
    packed, _ = make(form)
    tensors = load_file(packed / "model.safetensors")
    tensors[f"{DOWN}.{name}"] = damage(tensors[f"{DOWN}.{name}"]).contiguous()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        matrices(packed).matrix(DOWN, *SHAPE)


@pytest.mark.parametrize(
    "form", ["packed", "packed, with zeros", "packed by row", "floats", "floats by row", "floats in blocks", "nvfp4", "int8"]
)
def test_compressed_tensors_reads_the_same(form, make):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    packed, _ = make(form)
    config = (FORMATS | EXPANDED)[form].config
    tensors = load_file(packed / "model.safetensors")
    layer = {name.removeprefix(f"{DOWN}."): tensor for name, tensor in tensors.items() if name.startswith(f"{DOWN}.")}
    layer.pop("input_scale", None)
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    whole = BaseCompressor.get_value_from_registry(config["format"]).decompress(layer, scheme)["weight"]
    found = matrices(packed).matrix(DOWN, *SHAPE)
    found = torch.from_numpy(multiply_out(found) if form in FORMATS else found)
    # It multiplies in the dtype of the scales.
    assert (found - whole.float()).norm() <= 2**-8 * found.norm()


def test_torch_refuses_nvfp4_of_modelopt_by_name(make):
    packed, _ = make("nvfp4 of modelopt")
    with pytest.raises(UnsupportedModel, match="quantised with modelopt, which transformers does not know"):
        LLM(str(packed), runner="torch", **SIZES)


@pytest.mark.parametrize("form", ["gptq", "gptq, desc_act", "packed, with zeros", "floats by row", "fp8 in blocks", "modelopt"])
def test_both_back_ends_answer_as_the_model_that_a_checkpoint_stands_for(form, make):
    packed, plain = make(form, "llama-biased" if form.startswith("fp8") else "qwen3")
    [expected, rust, torch_] = [
        LLM(str(directory), runner=runner, dtype="float32", **SIZES)
        for directory, runner in ((plain, "rust"), (packed, "rust"), (packed, "torch"))
    ]
    answers = [output.token_ids for output in expected.generate(PROMPTS, GREEDY)]
    for llm in (rust, torch_):
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == answers
    assert ["weights", f"{ModelConfig.load(packed).scheme.name}, in float32", "as in the checkpoint"] in torch_.info.decisions


def test_rust_says_that_it_multiplies_out(make):
    packed, _ = make("awq", dtype=torch.bfloat16)
    decisions = LLM(str(packed), **SIZES).info.decisions
    [[_, value, reason]] = [row for row in decisions if row[0] == "weights"]
    assert value == "bfloat16"
    assert "the checkpoint's awq int4 multiplied out" in reason


@pytest.mark.parametrize("form", ["packed, with zeros", "fp8 in blocks", "floats by row", "floats"])
def test_processes_have_parts_of_a_matrix(form, tmp_path, monkeypatch):
    for name, size in {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}.items():
        monkeypatch.setitem(tiny_models.SHAPE, name, size)
    (tmp_path / "plain").mkdir()
    tiny_models.write("llama", tmp_path / "plain")
    quantise_checkpoint(tmp_path / "plain", tmp_path / "packed", form)
    whole = TorchWeights(matrices(tmp_path / "packed"), torch.float32, torch.device("cpu"))
    parts = [Shards(whole, TensorParallelGroup(rank, 2)) for rank in range(2)]
    for layer, outs, ins, axis in ((DOWN, 64, 128, 1), (DOWN.replace("down", "up"), 128, 64, 0)):
        sizes = (outs, ins // 2) if axis else (outs // 2, ins)
        found = [part.matrix(layer, *sizes) for part in parts]
        assert torch.equal(
            torch.cat([dequantise(part, torch.float32) for part in found], axis), dequantise(whole.matrix(layer, outs, ins), torch.float32)
        )
        assert all(2 * part.numbers.nbytes == whole.matrix(layer, outs, ins).numbers.nbytes for part in found)


@pytest.mark.parametrize("form", ["gptq", "gptq, desc_act"])
def test_two_processes_answer_as_one_does(form, tmp_path, byte_model, monkeypatch):
    for name, size in {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}.items():
        monkeypatch.setitem(tiny_models.SHAPE, name, size)
    (tmp_path / "plain").mkdir()
    tiny_models.write("llama", tmp_path / "plain")
    quantise_checkpoint(tmp_path / "plain", tmp_path / "packed", form)
    for name in ("plain", "packed"):
        shutil.copy(byte_model / "tokenizer.json", tmp_path / name)
    one = LLM(str(tmp_path / "plain"), **SIZES)
    two = LLM(str(tmp_path / "packed"), tensor_parallel_size=2, dtype="float32", **SIZES)
    expected = [output.token_ids for output in one.generate(PROMPTS, GREEDY)]
    assert [output.token_ids for output in two.generate(PROMPTS, GREEDY)] == expected


def test_groups_are_not_split_among_processes(make):
    packed, _ = make("gptq")
    message = "--tensor-parallel-size 2: the checkpoint has a scale for 16 columns each, which do not divide a part's 24"
    with pytest.raises(InvalidSetting, match=message):
        part_of(load_shape(packed), 2)


def test_scattered_groups_are_split_as_they_are_stored(tmp_path, monkeypatch):
    for name, size in {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}.items():
        monkeypatch.setitem(tiny_models.SHAPE, name, size)
    (tmp_path / "plain").mkdir()
    tiny_models.write("llama", tmp_path / "plain")
    quantise_checkpoint(tmp_path / "plain", tmp_path / "packed", "gptq, desc_act")
    whole = TorchWeights(matrices(tmp_path / "packed"), torch.float32, torch.device("cpu"))
    shards = [Shards(whole, TensorParallelGroup(rank, 2)) for rank in range(2)]
    up = DOWN.replace("down", "up")
    assert torch.equal(in_order(shards[1].matrix(up, 64, 64)), in_order(whole.matrix(up, 128, 64))[64:])
    parts, expected = [one.matrix(DOWN, 64, 64) for one in shards], whole.matrix(DOWN, 64, 128)
    assert torch.equal(torch.cat([part.order for part in parts]), expected.order)
    # Each process has whole groups, whose inputs are from all over.
    assert any((part.order < 64).any() and (part.order >= 64).any() for part in parts)
    x = torch.randn(3, 128)
    torch.testing.assert_close(Linear(parts[0])(x) + Linear(parts[1])(x), x @ in_order(expected).T)


def test_a_layer_may_be_left_whole(make):
    packed, _ = make("awq")
    tensors = load_file(packed / "model.safetensors")
    weight = torch.randn(SHAPE)
    for kind in ("qweight", "qzeros", "scales"):
        del tensors[f"{DOWN}.{kind}"]
    save_file(tensors | {f"{DOWN}.weight": weight}, packed / "model.safetensors")
    weights = matrices(packed)
    assert np.array_equal(weights.matrix(DOWN, *SHAPE), weight.numpy())
    # But what is multiplied at once is quantised alike.
    for kind in ("qweight", "qzeros", "scales"):
        del tensors[f"{DOWN.replace('down', 'up')}.{kind}"]
    tensors |= {f"{DOWN}.weight": weight, f"{DOWN.replace('down', 'up')}.weight": weight.T.contiguous()}
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"layers.1.mlp.gate_proj, .*up_proj: matrices of the same input are quantised in different"):
        LLM(str(packed), runner="torch", **SIZES)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("gptq", {"g_idx": torch.arange(80, dtype=torch.int32) // 20}, "g_idx of this GPTQ checkpoint does not have groups of 16 columns"),
        ("gptq", {"qzeros": torch.zeros(5, 5, dtype=torch.int32)}, r"qzeros is \[5, 5\] where config.json asks for \[5, 6\]"),
        ("gptq", {"bias": torch.ones(48)}, "tensors that its config.json does not account for: model.layers.1.mlp.down_proj.bias"),
        ("fp8 in blocks", {"weight_scale_inv": torch.ones(3, 5)}, r"weight_scale_inv is \[3, 5\] where config.json asks for \[3, 3\]"),
        ("fp8 in blocks", {"weight_scale_inv": torch.ones(3, 3).to(torch.float8_e8m0fnu)}, "weight_scale_inv is F8_E8M0"),
    ],
)
def test_tensors_that_do_not_belong_to_the_config_are_refused(form, changes, message, make):
    packed, _ = make(form)
    tensors = load_file(packed / "model.safetensors") | {f"{DOWN}.{kind}": tensor for kind, tensor in changes.items()}
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        LLM(str(packed), **SIZES)


@pytest.mark.parametrize("form", ["gptq", "fp8 in blocks", "packed by row"])
def test_memory_is_counted_as_it_is_kept(form, make):
    packed, _ = make(form)
    model = ModelConfig.load(packed)
    matrix = matrices(packed).matrix(DOWN, *SHAPE)
    assert model.scheme.weight_bytes(*SHAPE) == matrix.numbers.nbytes + matrix.scale.nbytes + (
        0 if matrix.zero is None else matrix.zero.nbytes
    )


def test_quantised_weights_that_cannot_fit_are_refused(make):
    packed, _ = make("gptq", dtype=torch.bfloat16)

    class Full:
        def read(self):
            return Memory(total=1 << 16, free=1 << 16, ours=0, tensors=0, peak=0)

    budget = DeviceBudget(Full(), 0.5)
    with pytest.raises(OutOfMemory, match=r"the weights take .* in gptq int4, and there are .* use a smaller model"):
        budget.check(EngineConfig(device="cuda"), ModelConfig.load(packed), Precision("bfloat16", "gptq int4", "bfloat16", "bfloat16"))


def test_a_quantised_model_has_no_whole_weight(make):
    packed, _ = make("gptq")
    model = ModelConfig.load(packed)
    loaded = TorchExecutor.load(EngineConfig(device="cpu"), packed, model, Precision("float32", model.scheme.name, "float32", "float32"))
    layer = loaded.network.layers[0]
    assert all(
        isinstance(linear.weight, Quantised) for linear in (layer.mixer.qkv, layer.mixer.output, layer.feed.gate_up, layer.feed.down)
    )


@pytest.mark.parametrize(
    ("form", "rounds"),
    [
        *(("floats", True), ("floats by row", True), ("floats in blocks", False), ("fp8", True), ("fp8 in blocks", False)),
        *(("modelopt", True), ("modelopt by row", True)),
    ],
)
def test_activations_are_rounded_if_a_checkpoint_is_made_for_it_and_scales_are_of_rows(form, rounds, make):
    packed, _ = make(form)
    model = ModelConfig.load(packed)
    assert model.scheme.per_token == rounds
    precision = Precision("bfloat16", model.scheme.name, "bfloat16", "bfloat16", rounds)
    loaded = TorchExecutor.load(EngineConfig(device="cpu"), packed, model, precision)
    layer = loaded.network.layers[0]
    assert all(linear.rounds_activations == rounds for linear in (layer.mixer.qkv, layer.mixer.output, layer.feed.gate_up, layer.feed.down))


BAD = {
    "bits": ("gptq", {"bits": 3}, "3 bits"),
    "layout": ("gptq", {"checkpoint_format": "marlin"}, "4 bits, marlin"),
    "group": ("gptq", {"group_size": 24}, "groups of 24 have no code of ours"),
    "gemv": ("awq", {"version": "gemv"}, "4 bits, gemv"),
    "mixed": (
        "modelopt",
        {"quant_algo": "MIXED_PRECISION"},
        r"a checkpoint quantised with modelopt \(MIXED_PRECISION\) has no code of ours",
    ),
    "bits of a layer": ("auto-round", {"extra_config": {"lm_head": {"bits": 8}}}, "8 bits of None"),
    "groups of a layer": ("auto-round", {"extra_config": {"lm_head": {"bits": 4, "group_size": 32}}}, "in several ways"),
    "unknown layout": ("auto-round", {"packing_format": "auto_round:mine"}, "quantised with auto-round"),
    "mlx": ("mlx", {DOWN: {"mode": "mxfp4"}}, r"quantised with mlx \(mode mxfp4\) has no code of ours"),
    "int2": ("packed", {"config_groups": {"a": {"weights": {"type": "int", "num_bits": 2, "strategy": "channel"}}}}, "int2"),
    "unknown": ("fp8", {"quant_method": "mine"}, "a checkpoint quantised with mine has no code of ours .*compressed-tensors.*GPTQ and AWQ"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_scheme_without_code_is_named_with_those_that_have_some(name, make):
    form, changes, message = BAD[name]
    packed, _ = make(form)
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"] |= changes
    (packed / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.load(packed)


def describe_in_a_file(packed: Path, **changes: str) -> None:
    """Describes a checkpoint of ModelOpt as its older versions do."""
    raw = json.loads((packed / "config.json").read_text())
    quantization = raw.pop("quantization_config") | changes
    (packed / "config.json").write_text(json.dumps(raw))
    described = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": quantization["quant_algo"], "exclude_modules": ["lm_head"]},
    }
    (packed / "hf_quant_config.json").write_text(json.dumps(described))


def test_a_checkpoint_that_modelopt_describes_in_a_file_is_read(make):
    packed, plain = make("modelopt")
    expected = load_file(plain / "model.safetensors")[f"{DOWN}.weight"]
    describe_in_a_file(packed)
    assert ModelConfig.load(packed).scheme.name == "modelopt e4m3"
    assert torch.equal(torch.from_numpy(multiply_out(matrices(packed).matrix(DOWN, *SHAPE))), expected)


@pytest.mark.parametrize(
    ("form", "file", "names"),
    [("gptq", "quantize_config.json", {}), ("awq", "quant_config.json", {"bits": "w_bit", "group_size": "q_group_size"})],
)
def test_a_checkpoint_that_an_older_version_describes_in_a_file_is_read(form, file, names, make):
    packed, _ = make(form)
    expected = ModelConfig.load(packed).scheme
    raw = json.loads((packed / "config.json").read_text())
    found = raw.pop("quantization_config")
    found.pop("quant_method")
    (packed / "config.json").write_text(json.dumps(raw))
    (packed / file).write_text(json.dumps({names.get(name, name): value for name, value in found.items()}))
    assert ModelConfig.load(packed).scheme == expected


@pytest.mark.parametrize("in_a_file", [False, True])
def test_modelopt_that_nobody_reads_ends_a_start_by_name(in_a_file, make):
    packed, _ = make("modelopt")
    if in_a_file:
        describe_in_a_file(packed, quant_algo="MIXED_PRECISION")
    else:
        raw = json.loads((packed / "config.json").read_text())
        raw["quantization_config"]["quant_algo"] = "MIXED_PRECISION"
        (packed / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        UnsupportedModel, match=r"quantised with modelopt.* which transformers .*modelopt \(MIXED_PRECISION\) has no code of ours"
    ):
        LLM(str(packed), **SIZES)
