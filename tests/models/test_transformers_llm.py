"""Checkpoints that transformers computes, through the whole engine: greedy tokens equal those of its own `generate`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from quantised_checkpoints import FORMATS, GROUP, Format, Packed, compressed, e4m3, pack_quantized
from safetensors.torch import load_file, save_file
from tiny_transformers import EXPERTS, MIXED, YARN, build, configure

from chairlift import LLM, SamplingParams
from chairlift.errors import ModelNotFound, UnsupportedModel
from chairlift.models import transformers_model
from chairlift.models.config import load_shape
from chairlift.models.transformers_model import TransformersModel

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5], list(range(3, 40)), [7, 9, 7, 9, 7, 9], list(range(60, 80)), [200] * 13]
SETTINGS = {"device": "cpu", "num_kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
NOT_OURS = {"hidden_act": "gelu"}
"""A setting of Llama that the code here lacks."""


@pytest.fixture
def save(tmp_path: Path, byte_model: Path):
    """Writes a checkpoint of random weights, with a tokenizer, and returns the model that it is of."""

    def write(name: str, **changes: object) -> torch.nn.Module:
        model = build(configure(name, vocab_size=300, **changes))
        model.save_pretrained(tmp_path)
        shutil.copy(byte_model / "tokenizer.json", tmp_path)
        return model

    return write


def generated(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The tokens that transformers' own `generate` says after a prompt."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
    return tokens


def code(llm: LLM) -> list[str]:
    [row] = [row for row in llm.info.decisions if row[0] == "code"]
    return row[1:]


@pytest.mark.parametrize(
    ("name", "changes", "by"),
    [
        ("gemma2", MIXED, "Gemma2ForCausalLM, in Rust"),
        ("apertus", {}, "transformers' ApertusForCausalLM, with paged attention"),
        ("gpt_oss", EXPERTS | MIXED, "GptOssForCausalLM, in Rust"),
        ("vaultgemma", MIXED, "transformers' VaultGemmaForCausalLM, with paged attention"),
        ("llama", {"rope_parameters": YARN}, "LlamaForCausalLM, in Rust"),
        # Their tensors keep the names of the code that came with them.
        ("exaone", {"architectures": ["ExaoneForCausalLM"]}, "transformers' LlamaForCausalLM, with paged attention"),
        ("exaone", {}, "transformers' LlamaForCausalLM, with paged attention"),
        ("sarvam_moe", EXPERTS, "transformers' Glm4MoeForCausalLM, with paged attention"),
    ],
)
def test_greedy_tokens_are_those_of_generate(name, changes, by, save, tmp_path):
    reference = save(name, **changes)
    llm = LLM(str(tmp_path), **SETTINGS)
    assert code(llm)[0] == by
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == generated(reference, prompt)
    # And from the prefix cache.
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [output.token_ids for output in outputs]


def test_random_weights_need_a_config_alone(save, tmp_path):
    save("apertus", max_position_embeddings=64)
    (tmp_path / "model.safetensors").unlink()
    llms = [LLM(str(tmp_path), load_format="dummy", seed=seed, **SETTINGS) for seed in (3, 3, 4)]
    first, again, other = (llm.generate([[5, 6, 7]], GREEDY)[0].token_ids for llm in llms)
    assert first == again != other
    assert llms[0].info.max_model_len == 64


def test_weights_of_another_format_are_named(save, tmp_path):
    save("apertus")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"holds no \*\.safetensors file: convert the weights to safetensors"):
        LLM(str(tmp_path), **SETTINGS)


def test_weights_that_are_missing_are_not_made_up(save, tmp_path):
    save("apertus")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks weights .* model.layers.1.mlp.up_proj.weight"):
        LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize(
    ("method", "packages"), [("gptq", "gptqmodel and optimum"), ("awq", "accelerate and gptqmodel"), ("torchao", "torchao")]
)
def test_a_quantised_checkpoint_needs_packages_before_it_is_read(method, packages, save, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_model, "_installed", lambda name: name == "optimum")
    save("llama", **NOT_OURS)
    (tmp_path / "model.safetensors").write_bytes(b"not to be read")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method, "bits": 4}}))
    lacking = packages.replace(" and optimum", "").replace(" and ", " ")
    message = f"LlamaForCausalLM is quantised with {method}, which .* the help of {packages}: pip install {lacking} "
    with pytest.raises(UnsupportedModel, match=message):
        LLM(str(tmp_path), **SETTINGS)


def test_a_device_gets_weights_from_the_files_and_not_by_way_of_the_host(save, tmp_path, monkeypatch):
    save("apertus")
    model, device, found = load_shape(tmp_path), torch.device("meta"), []

    class Decoders:
        @staticmethod
        def from_pretrained(directory, **settings):
            found.append(settings["device_map"])
            raise OSError("as far as this test goes")

    monkeypatch.setattr(transformers_model, "DECODERS", Decoders)
    with pytest.raises(UnsupportedModel, match="as far as this test goes"):
        TransformersModel.load(model, tmp_path, torch.float32, device, 64, None)
    assert found == [device]
    monkeypatch.setattr(transformers_model, "_installed", lambda name: False)
    with pytest.raises(
        UnsupportedModel, match=r"^transformers loads ApertusForCausalLM onto a device with accelerate: pip install accelerate$"
    ):
        TransformersModel.load(model, tmp_path, torch.float32, device, 64, None)
    assert len(found) == 1


def test_a_quantization_that_nobody_knows_is_refused(save, tmp_path):
    save("llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mine"}}))
    message = (
        r"quantised with mine, which transformers does not know \(a checkpoint quantised with mine has no code of ours \(there is for comp"
    )
    with pytest.raises(UnsupportedModel, match=message):
        LLM(str(tmp_path), **SETTINGS)


def integers(weight: torch.Tensor) -> Packed:
    """Integers of 8 bits, with a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round()
    return Packed({"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale)


QUANTISED = {
    "packed": (
        FORMATS["packed"]._replace(pack=pack_quantized(True, GROUP, torch.float32)),
        NOT_OURS,
        "compressed_tensors",
    ),
    "integers": (Format(integers, compressed("int-quantized", 8, "int", strategy="channel")), NOT_OURS, "compressed_tensors"),
    "floats": (FORMATS["floats by row"]._replace(pack=e4m3(1, 0, "weight_scale")), NOT_OURS, "compressed_tensors"),
    "blocks": (FORMATS["fp8 in blocks"], NOT_OURS, "accelerate"),
}
"""Formats and models of which one has no code of ours. Scales are in the model's dtype, because transformers multiplies in theirs."""


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_checkpoint_is_the_model_that_its_weights_stand_for(name, save, tmp_path):
    (pack, quantization), changes, package = QUANTISED[name]
    pytest.importorskip(package)
    reference = save("llama", **changes)
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        parts, whole = pack(tensor) if key.endswith("proj.weight") else Packed({"weight": tensor}, tensor)
        tensors |= {f"{key.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
        reference.get_parameter(key).data.copy_(whole)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    llm = LLM(str(tmp_path), **SETTINGS)
    assert ["weights", f"{quantization['quant_method']}, in float32", "as in the checkpoint"] in llm.info.decisions
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        assert output.token_ids == generated(reference, prompt)


def test_code_that_comes_with_a_checkpoint_is_not_run(save, tmp_path):
    save("llama")
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": {"AutoConfig": "mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(UnsupportedModel, match=r"MineForCausalLM has no code of ours .* transformers cannot read it either"):
        LLM(str(tmp_path), **SETTINGS)
