"""Each entry of a config.json is used, known to change nothing, or reported."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from quantised_checkpoints import EXPANDED, FORMATS
from tiny_models import LATENT, SHAPE
from transformers import AwqConfig, BitsAndBytesConfig, FineGrainedFP8Config, GPTQConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from chairlift.architectures import ARCHITECTURES, ENCODERS, WRAPPED
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig, load_shape
from chairlift.models.encoder import EncoderConfig
from chairlift.models.entries import report_entries
from chairlift.models.fields import Entries, NoNativeModel

SPECIAL: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "GraniteMoeSharedForCausalLM": {"shared_intermediate_size": 8},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4vMoeForConditionalGeneration": {"head_dim": 128},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "Gemma3TextModel": {"use_bidirectional_attention": True},
}
"""What the defaults of transformers lack to be a model."""
LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 4}

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 16, "vocab_size": 100, "hidden_activation": "silu", "layer_types": ["sliding_attention", "full_attention"]}
QUANTIZED = FORMATS | EXPANDED
GPTQ = {"damp_percent": 0.05, "damp_auto_increment": 0.0025, "static_groups": False, "true_sequential": True, "lm_head": False}
GPTQ |= {
    "meta": {"quantizer": ["gptqmodel:2.0.0"], "mse": 0.0},
    "pack_dtype": "int32",
    "model_file_base_name": "model",
    "use_exllama": True,
}
GPTQ |= {"model_name_or_path": "a/b", "tokenizer": None, "dataset": "c4", "batch_size": 1, "cache_block_outputs": True}
GPTQ |= {"dynamic": {"-:.*attn.*": {}, "-:.*mtp.*": {}, "lm_head": {}}}
GPTQ |= {"modules_in_block_to_quantize": ["q_proj"], "exllama_config": {"version": 1}, "block_name_to_quantize": "model.layers"}
ROUND = {
    "amp": True,
    "autoround_version": "0.5",
    "dataset": "pile",
    "enable_quanted_input": True,
    "iters": 200,
    "lr": 0.005,
    "minmax_lr": 0.005,
}
ROUND |= {"low_gpu_mem_usage": True, "nsamples": 512, "seqlen": 2048, "scale_dtype": "torch.float16", "train_bs": 8, "act_dynamic": True}
ROUND |= {"gradient_accumulate_steps": 1, "act_data_type": "int", "act_bits": 16, "to_quant_block_names": "model.layers", "sampler": "rand"}
BITSANDBYTES = {
    "llm_int8_threshold": 6.0,
    "llm_int8_skip_modules": ["lm_head"],
    "bnb_4bit_compute_dtype": "bfloat16",
    "load_in_8bit": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "awq": {
        "modules_to_not_convert": ["lm_head"],
        "do_fuse": True,
        "fuse_max_seq_len": 512,
        "modules_to_fuse": {"mlp": []},
        "backend": "auto",
    },
    "auto-round": ROUND,
    "intel/auto-round": ROUND,
    "fp8": {"fmt": "e4m3", "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"], "kv_cache_scheme": None, "ignored_layers": ["a"]},
    "modelopt": {
        "producer": {"name": "modelopt"},
        "exclude_modules": ["lm_head"],
        "kv_cache_quant_algo": "FP8",
        "config_groups": {"group_0": {}},
    },
    "bitsandbytes": BITSANDBYTES | {"bnb_4bit_quant_storage": "uint8"},
    "compressed-tensors": {
        "global_compression_ratio": 1.5,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12",
        "kv_cache_scheme": None,
    },
    "mlx": {"model.embed_tokens": {"group_size": 64, "bits": 8}, "lm_head.linear": False},
}
"""Settings that published checkpoints have, by method."""


def usual(name: str, **changes: object) -> dict[str, Any]:
    """The content of a config.json with all entries of a class of transformers."""
    config = getattr(transformers, name).config_class(architectures=[name], **changes)
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found | SPECIAL.get(name, {})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_entries_of_transformers_classes_are_known(name: str) -> None:
    raw = usual(name if hasattr(transformers, name) else ARCHITECTURES[name].wrappers[0])
    text = raw.get("text_config", raw)
    assert ModelConfig.parse(raw).unread == ()
    text["depth_of_thought"] = 3
    assert ModelConfig.parse(raw).unread == ("depth_of_thought",)
    text["thought_multiplier"] = 0.5
    with pytest.raises(NoNativeModel, match=r"^thought_multiplier 0\.5 has no code of ours"):
        ModelConfig.parse(raw)


@pytest.mark.parametrize("name", [name for name in ENCODERS if hasattr(transformers, name)])
def test_all_entries_of_encoders_are_known(name: str, tmp_path: Path) -> None:
    raw = usual(name, **{"num_labels": 1} if name.endswith("ForSequenceClassification") else {})

    def unread(**more: object) -> tuple[str, ...]:
        (tmp_path / "config.json").write_text(json.dumps(raw | more))
        found = EncoderConfig.find(tmp_path)
        assert found is not None
        return found.unread

    assert unread() == ()
    assert unread(depth_of_thought=3) == ("depth_of_thought",)


def test_what_changes_nothing_is_not_reported() -> None:
    neutral = {
        "use_thoughts": False,
        "thoughts": None,
        "thought_multiplier": 1.0,
        "thought_scale": 0,
        "thought_cap": [],
        "unsloth_fixed": True,
    }
    published = {"rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}, "neftune_noise_alpha": 5, "pretraining_tp": 2}
    assert ModelConfig.parse(LLAMA | neutral | published).unread == ()
    assert ModelConfig.parse(LLAMA | {"use_thoughts": True}).unread == ("use_thoughts",)


@pytest.mark.parametrize(
    "name", ["logits_scaling", "rope_interleaved", "block_configs", "num_heads_per_layer", "swiglu_limits", "sliding_windows"]
)
def test_what_would_change_answers_is_refused_if_transformers_does_not_know_it_either(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {name: [8.0], "model_type": "llama"}))
    with pytest.raises(UnsupportedModel, match=f"{name} .* has no code of ours, and transformers' code does not read it: remove it"):
        load_shape(tmp_path)


def test_a_flag_that_transformers_does_not_know_is_reported(tmp_path: Path) -> None:
    assert ModelConfig.parse(LLAMA | {"use_parallel_block": True}).unread == ()  # Cohere's published files say so
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_interleaved": True, "model_type": "llama"}))
    shape = load_shape(tmp_path)
    assert (shape.not_ours, shape.unread) == ("rope_interleaved True has no code of ours", ("rope_interleaved",))


def test_transformers_code_computes_what_it_knows_and_reports_the_rest(tmp_path: Path) -> None:
    raw = usual("DeepseekV2ForCausalLM", **SHAPE | LATENT, q_lora_rank=None)
    assert ModelConfig.parse(raw).unread == ()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"norm_topk_prob": True, "depth_of_thought": 3}))
    shape = load_shape(tmp_path)
    assert (shape.not_ours, shape.unread) == ("norm_topk_prob True has no code of ours", ("depth_of_thought",))


def test_entries_of_rotary_parameters_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    table = {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}
    config = ModelConfig.parse(LLAMA | {"rope_scaling": table})
    assert config.unread == ("rope_scaling.alpha",)
    by_kind = {"sliding_attention": {"rope_theta": 1e4, "wave": 2}, "full_attention": {"rope_theta": 1e6}}
    assert ModelConfig.parse(usual("Gemma3ForCausalLM") | {"rope_parameters": by_kind}).unread == ("rope_parameters.wave",)
    report_entries(Path("model"), config)
    assert caplog.messages == ["model/config.json has entries that are not known here and not used: rope_scaling.alpha"]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in WRAPPED))
def test_entries_beside_a_model_of_text_are_known(name: str) -> None:
    raw = usual(name) | {"text_config": LLAMA | {"model_type": next(kind for wrapper, kind in WRAPPED if wrapper == name)}}
    raw["text_config"] |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    known = WRAPPED[name, raw["text_config"]["model_type"]]
    if known.mixture or known.recurrence or known.global_head_dim:
        raw["text_config"] = usual(name)["text_config"] | SPECIAL.get(name, {})
    assert ModelConfig.parse(raw).unread == ()
    raw |= {"depth_of_thought": 3, "vocab_size": 50, "rope_theta": 5.0, "max_position_embeddings": None}
    raw["text_config"] |= {"rope_theta": 6.0}
    assert set(ModelConfig.parse(raw).unread) == {f"{name} beside text_config" for name in ("depth_of_thought", "vocab_size", "rope_theta")}
    with pytest.raises(NoNativeModel, match=r"^thought_multiplier 0\.5 has no code of ours"):
        ModelConfig.parse(raw | {"thought_multiplier": 0.5})


def test_transformers_code_reads_the_same_entries_beside_a_model_of_text(tmp_path: Path) -> None:
    raw = usual("Gemma3ForConditionalGeneration")
    raw["text_config"] |= SMALL
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vocab_size": 5, "depth_of_thought": 3}))
    shape = load_shape(tmp_path)
    assert shape.not_ours == "hidden_activation 'silu' has no code of ours (there is for gelu_pytorch_tanh)"
    assert set(shape.unread) == {"vocab_size beside text_config", "depth_of_thought beside text_config"}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"logit_multiplier": 0.5}))
    with pytest.raises(UnsupportedModel, match=r"logit_multiplier 0\.5 has no code of ours, and transformers' code does not read it"):
        load_shape(tmp_path)


def test_mlx_names_the_quantization_beside_the_model_of_text() -> None:
    raw = usual("Gemma3ForConditionalGeneration") | {"quantization": {"group_size": 64, "bits": 4}}
    assert ModelConfig.parse(raw).quantization == "mlx integers"


@pytest.mark.parametrize(("name", "kind"), [("Qwen3MoeForCausalLM", "experts"), ("Qwen3_5ForCausalLM", "recurrent layers")])
def test_mlx_stores_experts_and_convolutions_otherwise(name: str, kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"MLX's conversions of models with {kind} cannot be read: take a GGUF file"):
        ModelConfig.parse(usual(name) | {"quantization": {"group_size": 64, "bits": 4}})


@pytest.mark.parametrize("name", QUANTIZED)
def test_unknown_settings_of_a_quantization_are_refused_or_reported(name: str) -> None:
    config = QUANTIZED[name].config
    method = str(config.get("quant_method", "mlx"))
    assert ModelConfig.parse(LLAMA | {"quantization_config": config | PUBLISHED[method]}).unread == ()
    found = ModelConfig.parse(LLAMA | {"quantization_config": config | {"thoughts": 3, "rotation": None}})
    assert found.unread == ("quantization_config.thoughts",)
    with pytest.raises(NoNativeModel, match=f"rotation 'hadamard' of a checkpoint quantised with {method} has no"):
        ModelConfig.parse(LLAMA | {"quantization_config": config | {"rotation": "hadamard"}})


SAVED: dict[str, QuantizationConfigMixin] = {
    "gptq": GPTQConfig(4, tokenizer="a", dataset="c4"),
    "awq": AwqConfig(4),
    "nf4": BitsAndBytesConfig(load_in_4bit=True),
    "fp8 in blocks": FineGrainedFP8Config(),
}
"""Settings as transformers saves them."""


@pytest.mark.parametrize("name", SAVED)
def test_the_settings_that_transformers_saves_are_known(name: str) -> None:
    config = json.loads(json.dumps(SAVED[name].to_dict()))
    assert ModelConfig.parse(LLAMA | {"quantization_config": QUANTIZED[name].config | config}).unread == ()


def test_other_bits_in_some_layers_of_gptq_are_refused() -> None:
    config = QUANTIZED["gptq"].config | {"dynamic": {"-:.*attn.*": {}, "+:.*down.*": {"bits": 8}}}
    with pytest.raises(NoNativeModel, match=r"quantised with gptq \(other bits in some layers, or a quantised head\)"):
        ModelConfig.parse(LLAMA | {"quantization_config": config})


def test_experts_in_other_numbers_than_fp8_are_refused() -> None:
    config = QUANTIZED["fp8 in blocks"].config | {"expert_dtype": "fp4"}
    with pytest.raises(NoNativeModel, match=r"quantised with fp8 \(experts in fp4\) has no code of ours"):
        ModelConfig.parse(LLAMA | {"quantization_config": config})


def test_groups_of_layers_are_needed_and_their_columns_are_checked() -> None:
    config = json.loads(json.dumps(QUANTIZED["packed and floats in blocks"].config))
    config["config_groups"]["group_1"]["weights"]["group_size"] = 24
    with pytest.raises(NoNativeModel, match="quantised groups of 24 have no code of ours"):
        ModelConfig.parse(LLAMA | {"quantization_config": config})
    with pytest.raises(NoNativeModel, match=r"quantised with compressed-tensors \(no groups of layers\) has no code of ours"):
        ModelConfig.parse(LLAMA | {"quantization_config": config | {"config_groups": {}}})


def test_unknown_settings_of_a_group_of_layers_are_refused() -> None:
    config = json.loads(json.dumps(QUANTIZED["packed"].config))
    config["config_groups"]["group_0"]["weights"]["codebook"] = "e8"
    with pytest.raises(NoNativeModel, match=r"quantised with compressed-tensors \(codebook\) has no code of ours"):
        ModelConfig.parse(LLAMA | {"quantization_config": config})


def test_another_score_of_experts_is_refused() -> None:
    raw = usual("DeepseekV2ForCausalLM")
    assert ModelConfig.parse(raw | {"scoring_func": "softmax"}) == ModelConfig.parse(raw)
    with pytest.raises(UnsupportedModel, match="scoring_func is 'sigmoid', and there is code for softmax"):
        ModelConfig.parse(raw | {"scoring_func": "sigmoid"})


def test_copies_with_other_entries_remember_what_was_asked_for() -> None:
    entries = Entries(dict.fromkeys("abcde", 1))
    copy = entries | {"e": 2, "f": 3}
    assert (copy["a"], copy.get("b"), "c" in copy, copy.get("x")) == (1, 1, True, None)
    assert entries.unread() == {"d": 1, "e": 1}
    assert copy.unread() == {"d": 1, "e": 2, "f": 3}
