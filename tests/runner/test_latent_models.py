"""Attention to latents (DeepSeek, GLM-4.7-Flash): in an engine, from old files, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from cpu_logits import logits
from gguf import GGMLQuantizationType as Kind
from gguf_files import gguf_of, tiny_model
from gguf_latent import GROUPS, LATENT, YARN
from safetensors.numpy import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.architectures import ARCHITECTURES
from chairlift.checkpoint.gguf import convert
from chairlift.checkpoint.gguf_config import architecture_of
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.models.fields import NoNativeModel

V3 = {**LATENT, **GROUPS, "rope_parameters": {"rope_theta": 500.0, **YARN}}
OLD = {f"deepseek2.attention.{key}": value for key, value in {"key_length_mla": None, "value_length_mla": None, "head_count_kv": 4}.items()}
OLD |= {"deepseek2.attention.key_length": 40, "deepseek2.attention.value_length": 16, "deepseek2.expert_gating_func": None}


@pytest.mark.parametrize(("kv", "size"), [("float16", 2 * 48), ("int8", 48 + 2 * 4)])
@pytest.mark.slow
def test_an_engine_gives_the_same_tokens_with_caches_forks_and_little_memory(tmp_path: Path, kv: str, size: int) -> None:
    gguf_of(tiny_model("deepseek_v3", **V3), tmp_path / "tiny.gguf", Kind.Q8_0)
    prompts = [np.random.default_rng(seed).integers(0, 256, 40 + seed).tolist() for seed in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    small: dict[str, Any] = {"device": "cpu", "threads": 2, "block_size": 8, "cache_dir": str(tmp_path / "cache"), "kv_cache_dtype": kv}
    with LLM(str(tmp_path / "tiny.gguf"), **small, max_num_seqs=1, num_kv_blocks=40, enable_prefix_caching=False) as llm:
        expected = [llm.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in prompts]
        # A latent of 32 numbers and a rotated key of 8, padded to 48, in each of two layers; in int8 there are scales of keys and values.
        blocks = llm.engine.runner.kv_blocks
        assert blocks is not None
        assert llm.engine.runner.kv_cache_bytes == 40 * len(blocks.read(0)) == 40 * 8 * 2 * size
    with LLM(str(tmp_path / "tiny.gguf"), **small, max_num_seqs=4, num_kv_blocks=60, max_num_batched_tokens=24) as llm:
        for found in (0, 32):
            outputs = llm.generate(prompts, greedy)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert all(found <= output.cached_tokens <= found + 8 for output in outputs)
        several = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, n=2)
        assert [one.token_ids for one in llm.generate([prompts[0]], several)[0].outputs] == [expected[0]] * 2
    for found in (0, 32):  # the second engine finds the blocks of the first one on disk
        with LLM(str(tmp_path / "tiny.gguf"), **small, num_kv_blocks=60, prefix_cache_dir=str(tmp_path / "kv")) as llm:
            (output,) = llm.generate(prompts[:1], greedy)
            assert (output.outputs[0].token_ids, output.cached_tokens) == (expected[0], found)
    # Room for the blocks of little more than two of the four sequences.
    for swap in (0, 1 << 20):
        with LLM(str(tmp_path / "tiny.gguf"), **small, max_num_seqs=4, num_kv_blocks=20, max_num_batched_tokens=24, swap_space=swap) as llm:
            assert [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)] == expected
            assert llm.engine.stats().preemptions > 0


@pytest.mark.slow
def test_old_files_have_one_tensor_of_keys_and_values(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v2", **LATENT)
    gguf_of(model, tmp_path / "tiny.gguf", replaced=OLD)
    convert(tmp_path / "tiny.gguf", tmp_path / "converted")
    with torch.inference_mode():
        expected = model(torch.arange(11)[None] * 7 % 300).logits[0].numpy()
    assert np.abs(logits(tmp_path / "converted") - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("replaced", [{}, OLD], ids=["new", "old"])
@pytest.mark.slow
def test_torch_answers_as_the_cpu_kernels_do_from_files_of_both_kinds(tmp_path: Path, replaced: dict[str, Any]) -> None:
    gguf_of(tiny_model("deepseek_v2", **LATENT), tmp_path / "tiny.gguf", replaced=replaced)
    prompt = np.random.default_rng(5).integers(0, 256, 30).tolist()
    settings: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "num_kv_blocks": 40,
        "cache_dir": str(tmp_path / "cache"),
        "dtype": "float32",
    }
    answers = []
    for runner in ("auto", "torch"):
        with LLM(str(tmp_path / "tiny.gguf"), **settings, runner=runner) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
            answers.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({}, "DeepseekV2ForCausalLM"),
        ({"deepseek2.expert_gating_func": 2}, "DeepseekV3ForCausalLM"),
        ({"deepseek2.block_count": 47}, "DeepseekV2ForCausalLM"),
        ({"deepseek2.block_count": 47, "vocabulary": 154_880}, "DeepseekV3ForCausalLM"),
        ({"deepseek2.block_count": 48, "vocabulary": 154_880, "deepseek2.expert_gating_func": 1}, "DeepseekV2ForCausalLM"),
    ],
)
def test_scores_of_experts_decide_the_architecture_of_a_file(metadata: dict[str, int], name: str) -> None:
    values = {"general.architecture": "deepseek2", "deepseek2.expert_count": 64, "deepseek2.block_count": 27} | metadata
    file = SimpleNamespace(get=lambda key, _: values.get(key), size=values.get, vocab_size=metadata.get("vocabulary", 102_400))
    assert architecture_of(file)[0] is ARCHITECTURES[name]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"attention.kv_lora_rank": None}, "kv_lora_rank"),
        ({"attention.key_length_mla": 8}, "the keys of a head have 8 numbers, which must be more than the 8 that are rotated"),
        ({"expert_group_used_count": 9}, "3 experts cannot be chosen from topk_group=9 of the n_group=4 groups of 12 experts"),
        ({"expert_used_count": 13}, "num_experts_per_tok is 13, and there are 12 experts"),
        ({"expert_shared_count": 1}, r"mlp.shared_experts.gate_proj.weight is \[64, 64\]"),
        ({"attention.q_lora_rank": 24}, r"self_attn.q_a_proj.weight is \[32, 64\]"),
        ({"leading_dense_block_count": 0}, "mlp.shared_experts.gate_proj.weight is missing"),
        ({"attention.temperature_scale": 0.1}, "attention.temperature_scale"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path: Path, metadata: dict[str, Any], reason: str) -> None:
    gguf_of(
        tiny_model("deepseek_v3", **V3), tmp_path / "tiny.gguf", replaced={f"deepseek2.{key}": value for key, value in metadata.items()}
    )

    def load() -> None:
        convert(tmp_path / "tiny.gguf", tmp_path / "converted")
        logits(tmp_path / "converted")

    with pytest.raises(UnsupportedModel, match=reason):
        load()


@pytest.mark.parametrize(
    ("changed", "kind", "reason"),
    [
        ({"kv_lora_rank": None}, UnsupportedModel, "kv_lora_rank must be a positive integer"),
        ({"q_lora_rank": 0}, UnsupportedModel, "q_lora_rank must be a positive integer"),
        ({"qk_rope_head_dim": 7}, UnsupportedModel, "qk_rope_head_dim must be even for rotary positions, got 7"),
        ({"mlp_layer_types": ["sparse"]}, UnsupportedModel, "mlp_layer_types must be dense or sparse for each of 3 layers"),
        ({"n_group": 5}, UnsupportedModel, "n_group=5 groups of 12 experts"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, UnsupportedModel, "4 experts cannot be chosen from topk_group=1"),
        ({"attention_bias": True}, NoNativeModel, "biases of attention to latents have no code of ours"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changed: dict[str, Any], kind: type[Exception], reason: str) -> None:
    config = {**tiny_models.SHAPE, **tiny_models.FAMILIES["deepseek-v3"][1], "architectures": ["DeepseekV3ForCausalLM"]}
    assert ModelConfig.parse(config).experts is not None
    with pytest.raises(kind, match=reason):
        ModelConfig.parse(config | changed)


@pytest.mark.parametrize("name", ["lfm2-moe", "nemotron-h-moe", "qwen3-next", "deepseek-v3", "qwen3-moe"])
def test_a_config_that_does_not_say_whether_weights_are_divided_means_the_default_of_transformers(name: str) -> None:
    family, settings = tiny_models.FAMILIES[name]
    config = {**tiny_models.SHAPE, **settings, "architectures": [f"{family}ForCausalLM"]}
    config.pop("norm_topk_prob", None)
    experts = ModelConfig.parse(config).experts
    assert experts is not None
    assert experts.normalised is getattr(transformers, f"{family}Config")().norm_topk_prob


@pytest.mark.slow
def test_layers_that_predict_later_tokens_are_not_used(tmp_path: Path) -> None:
    reference = tiny_models.write("glm4-moe-lite", tmp_path)
    weights, path = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    beyond = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in weights.items() if "layers.2." in name}
    save_file(weights | beyond, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"does not account for: model.layers.3"):
        logits(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    with torch.inference_mode():
        expected = reference(torch.arange(11)[None] * 7 % 199).logits[0].numpy()
    assert np.abs(logits(tmp_path) - expected).max() <= 1e-5 * np.abs(expected).max()
