import contextlib
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
import transformers
from quantised_checkpoints import compressed
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chairlift.architectures import ARCHITECTURES
from chairlift.errors import ModelNotFound, UnsupportedModel
from chairlift.models import encoder
from chairlift.models.config import ModelConfig, load_shape
from chairlift.models.encoder import EncoderConfig
from chairlift.models.fields import NoNativeModel
from chairlift.models.rope_config import parse_temperature
from chairlift.models.rotary import Dynamic, Linear, Llama3, LongRope, RopeConfig
from chairlift.models.shape import KvSpec

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def parse(**changes: object) -> ModelConfig:
    return ModelConfig.parse(BASE | changes)


def test_defaults_are_those_of_the_family():
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings, config.dtype) == (4, 16, 2048, None)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings) == (False,) * 5
    assert config.windows == (None, None, None)
    qwen2 = parse(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2)
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    qwen3 = parse(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert (qwen3.qk_norm, qwen3.head_dim) == (True, 128)
    experts = {"num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert parse(architectures=["SolarOpenForCausalLM"], **experts).head_dim == 128


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_transformers_writes_by_default_is_read(family, tmp_path):
    theirs = getattr(transformers, f"{family}Config")(architectures=[f"{family}ForCausalLM"])
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.load(tmp_path)
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == (theirs.num_key_value_heads or theirs.num_attention_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope == RopeConfig(dim=ours.head_dim, theta=theirs.rope_parameters["rope_theta"])
    assert ours.windows == ((4096,) * 32 if family == "Mistral" else (None,) * theirs.num_hidden_layers)
    # And where its config.json is silent.
    sizes = {name: getattr(theirs, name) for name in BASE}
    assert ModelConfig.parse(sizes).num_kv_heads == ours.num_kv_heads
    assert ModelConfig.parse(sizes).max_position_embeddings == ours.max_position_embeddings


def test_the_type_of_a_model_without_architectures_names_one():
    assert parse(architectures=None, model_type="qwen2", num_key_value_heads=2).architecture == "Qwen2ForCausalLM"
    assert parse(architectures=[], model_type="llama").architecture == "LlamaForCausalLM"
    assert parse(architectures=["MistralForCausalLM"], model_type="llama", num_key_value_heads=2).architecture == "MistralForCausalLM"


def test_both_spellings_of_rope_are_read():
    expected = RopeConfig(dim=16, theta=5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192))
    assert parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}).rope == expected
    assert parse(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}).rope == expected
    assert parse(rope_scaling={"rope_type": "linear", "factor": 2.0}).rope == RopeConfig(dim=16, scaling=Linear(2.0))
    assert parse(rope_theta=1e6, rope_scaling=None).rope == RopeConfig(dim=16, theta=1e6)
    written = {"rope_type": "default", "rope_theta": 5e5}
    scaled = RopeConfig(dim=16, theta=5e5, scaling=Linear(2.0))
    assert parse(rope_parameters=written, rope_scaling={"type": "linear", "factor": 2.0}).rope == scaled
    assert parse(rope_parameters=written, rope_scaling=None).rope == RopeConfig(dim=16, theta=5e5)
    assert written == {"rope_type": "default", "rope_theta": 5e5}  # what is read stays as it is
    with pytest.raises(NoNativeModel, match="by kind of layer"):
        parse(rope_parameters={"full_attention": written, "sliding_attention": written})


def test_queries_grow_from_the_length_that_the_model_was_made_for():
    for name in ("rope_parameters", "rope_scaling"):
        table = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
        assert parse_temperature({"max_position_embeddings": 64, name: table}) == (0.1, 64)
        assert parse_temperature({"max_position_embeddings": 64, name: {**table, "original_max_position_embeddings": 16}}) == (0.1, 16)


def test_sliding_windows_are_per_layer():
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}
    assert parse(**mistral, sliding_window=None).windows == (None,) * 3
    assert parse(**mistral, sliding_window=8).windows == (8,) * 3
    # transformers then takes the class of Ministral.
    listed = ["full_attention", "sliding_attention", "full_attention"]
    assert parse(**mistral, sliding_window=8, layer_types=listed).windows == (None, 8, None)
    ministral3 = {"architectures": ["Ministral3ForCausalLM"], "num_key_value_heads": 4, "sliding_window": 8}
    assert parse(**ministral3).windows == parse(**ministral3, layer_types=listed).windows == (8,) * 3
    assert parse(sliding_window=8).windows == (None,) * 3
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, "sliding_window": 8}
    assert parse(**qwen).windows == (None,) * 3
    assert parse(**qwen, use_sliding_window=True, max_window_layers=2).windows == (None, None, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse(**qwen, use_sliding_window=True, layer_types=types).windows == (8, None, 8)


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3"])
def test_what_transformers_writes_of_gemma_by_default_is_read(name, tmp_path):
    architecture = f"{name}ForCausalLM"
    theirs = getattr(transformers, architecture).config_class(architectures=[architecture], num_hidden_layers=7)
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.load(tmp_path)
    # And where its config.json is silent.
    assert ModelConfig.parse({name: getattr(theirs, name) for name in BASE}) == ours
    assert ours.windows == tuple(4096 if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert (ours.num_kv_heads, ours.head_dim, ours.scales.attention) == (4, 256, theirs.query_pre_attn_scalar**-0.5)
    assert (ours.scales.scores_cap, ours.scales.logits_cap) == (theirs.attn_logit_softcapping, theirs.final_logit_softcapping)
    assert (ours.family.activation, ours.scales.embedding, ours.family.norm_offset) == ("gelu_tanh", theirs.hidden_size**0.5, 1.0)
    assert (ours.tie_word_embeddings, ours.family.post_norms, ours.qk_norm) == (True, True, name == "Gemma3")
    assert (ours.rope.theta, ours.local_rope.theta) == ((1e6, 1e4) if name == "Gemma3" else (1e4, 1e4))


@pytest.mark.parametrize("name", ["SmolLM3", "Granite", "Phi3"])
def test_what_transformers_writes_of_others_by_default_is_read(name, tmp_path):
    architecture = f"{name}ForCausalLM"
    theirs = getattr(transformers, architecture).config_class(architectures=[architecture], num_hidden_layers=8)
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.load(tmp_path)
    # And where its config.json is silent.
    assert ModelConfig.parse({name: getattr(theirs, name) for name in BASE}) == ours
    assert (ours.num_kv_heads, ours.max_position_embeddings) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert (ours.rms_norm_eps, ours.tie_word_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.rope == RopeConfig(dim=ours.head_dim, theta=theirs.rope_parameters["rope_theta"])
    assert ours.uses_rope == tuple(map(bool, getattr(theirs, "no_rope_layers", [1] * 8)))
    assert ours.scales.attention == (1.0 if name == "Granite" else ours.head_dim**-0.5)
    assert not ours.only_in_rust


def granite4(**changes: object) -> ModelConfig:
    dense = {"num_local_experts": 0, "shared_intermediate_size": 72, "layer_types": ["attention"] * 3}
    return parse(architectures=["GraniteMoeHybridForCausalLM"], **dense | changes)


def test_granite_4_is_read_with_and_without_state_spaces():
    config = granite4(position_embedding_type="rope", logits_scaling=8, residual_multiplier=0.22, embedding_multiplier=12)
    assert (config.intermediate_size, config.uses_rope, config.scales.attention) == (72, (True,) * 3, 1.0)
    assert (config.scales.logits, config.scales.residual, config.scales.embedding) == (0.125, 0.22, 12.0)
    assert granite4().uses_rope == (False,) * 3
    assert granite4().recurrence is None
    space = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 2, "layer_types": ["mamba", "attention", "linear_attention"]}
    layers = granite4(**space, hidden_size=64, time_step_limit=[0.001, {"__float__": "Infinity"}]).recurrence
    assert layers is not None
    assert (layers.layers, layers.value_size, layers.taps, layers.steps) == ((True, False, True), 32, 4, (0.001, math.inf))
    assert layers.state_bytes == 4 * 2 * (3 * (128 + 2 * 2 * 16) + 4 * 16 * 32)


CONVOLUTIONS = {"architectures": ["Lfm2ForCausalLM"], "num_attention_heads": 8, "layer_types": ["conv", "full_attention", "conv"]}
HYBRID = {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention"] * 2 + ["full_attention"]}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention", "retention"]}, NoNativeModel, "layers of retention have no code of ours"),
        ({"layer_types": ["linear_attention", "full_attention"]}, UnsupportedModel, "layer_types has 2 entries for 3 layers"),
        ({"layer_types": ["linear_attention"] * 3}, UnsupportedModel, "none of 3 layers has attention"),
        ({"linear_conv_kernel_dim": 5}, NoNativeModel, "convolutions over 5 tokens have no code of ours"),
        ({"linear_key_head_dim": 24}, NoNativeModel, "a key size of 24 have no code of ours"),
        ({"linear_num_value_heads": 24}, UnsupportedModel, "24 recurrent heads cannot share 16 keys equally"),
        ({"linear_num_key_heads": 0}, UnsupportedModel, "linear_num_key_heads must be a positive integer"),
    ],
)
def test_recurrent_layers_that_cannot_be_computed_are_refused_by_name(changes: dict[str, object], error: type, message: str):
    assert parse(**HYBRID).state_bytes == 4 * 2 * (3 * 8192 + 32 * 128 * 128)
    with pytest.raises(error, match=message):
        parse(**HYBRID | changes)
    # Every fourth layer has attention where config.json does not say more.
    silent = {name: value for name, value in HYBRID.items() if name != "layer_types"}
    recurrence = parse(**silent, num_hidden_layers=8).recurrence
    assert recurrence is not None
    assert recurrence.layers == (True, True, True, False) * 2


NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "num_attention_heads": 8, "hybrid_override_pattern": "M-*ME", "head_dim": None}
NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 32, "attention_head_dim": 16, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
NEMOTRON |= {"n_routed_experts": 8, "moe_shared_expert_intermediate_size": 32, "n_groups": 2}


def test_layers_with_one_part_are_read_from_a_pattern_or_a_list():
    config = parse(**NEMOTRON)
    assert (config.num_layers, config.head_dim, config.gated) == (5, 16, False)
    assert (config.attention, config.feeds) == ((False, False, True, False, False), (False, True, False, False, True))
    assert config.recurrence is not None
    assert config.experts is not None
    assert (config.recurrence.layers, config.experts.layers) == ((True, False, False, True, False), (False,) * 4 + (True,))
    assert [len(config.matrices_of(layer)) for layer in range(5)] == [2, 2, 2, 2, 2]
    assert config.kv_specs == (KvSpec(config.num_kv_heads, 16, 16),)
    listed = ["mamba", "mlp", "attention", "linear_attention", "moe"]
    assert parse(**NEMOTRON | {"hybrid_override_pattern": None, "layers_block_type": listed}) == config
    assert parse(**NEMOTRON | {"hybrid_override_pattern": "M-*"}).experts is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hybrid_override_pattern": "M-X"}, UnsupportedModel, r"for each layer one of M \(linear_attention\), .* got 'M-X'"),
        ({"hybrid_override_pattern": None}, UnsupportedModel, "hybrid_override_pattern must have"),
        ({"hybrid_override_pattern": "MM-E"}, UnsupportedModel, "none of 4 layers has attention"),
        ({"layers_block_type": ["mamba", "attention", "xlstm"]}, NoNativeModel, "layers of xlstm have no code of ours"),
        ({"mlp_hidden_act": "silu"}, NoNativeModel, "mlp_hidden_act 'silu' has no code of ours"),
        ({"moe_latent_size": 32}, NoNativeModel, r"a width of their own \(moe_latent_size\)"),
        ({"n_group": 2}, NoNativeModel, r"experts in 2 groups \(n_group\)"),
    ],
)
def test_layers_with_one_part_that_cannot_be_computed_are_refused_by_name(changes: dict[str, object], error: type, message: str):
    with pytest.raises(error, match=message):
        parse(**NEMOTRON | changes)


def test_phi_4_mini_is_read_as_it_was_published():
    factors = {"short_factor": [1.0] * 6, "long_factor": [1.5] * 6, "type": "longrope"}
    shape = {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75, "sliding_window": 262144}
    lengths = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    config = parse(**shape, **lengths, rope_scaling=factors)
    assert (config.rope.dim, config.head_dim, config.windows) == (12, 16, (262144,) * 3)
    assert config.rope.scaling == LongRope(4096, (1.0,) * 6, (1.5,) * 6)
    assert config.rope.scale == pytest.approx(1.1902, abs=1e-4)
    assert np.allclose(config.rope.frequencies(4096), config.rope.frequencies(4097) * 1.5)


YARN = {"rope_type": "yarn", "factor": 4.0}
EXPERTS_BESIDE = {"enable_moe_block": True, "num_experts": 11, "moe_intermediate_size": 40}
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
LISTS = {"short_factor": [1.0, 1.5, 3.0, 4.0], "long_factor": [1.0, 3.0, 8.0, 9.0]}
SCALINGS: list[tuple[dict[str, object], int]] = [
    ({"rope_type": "linear", "factor": 3.0}, 64),
    ({"rope_type": "dynamic", "factor": 3.0}, 64),
    ({"rope_type": "dynamic", "factor": 3.0}, 150),
    ({"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 16}, 150),
    ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32}, 64),
    ({**YARN, "original_max_position_embeddings": 16}, 64),
    (YARN, 256),
    ({**YARN, "original_max_position_embeddings": 16, "truncate": False, "beta_fast": 8.0, "beta_slow": 0.5}, 64),
    ({**YARN, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.3}, 64),
    ({**YARN, "factor": None, "original_max_position_embeddings": 16, "attention_factor": 1.7}, 64),
    ({"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 16}, 64),
    ({"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 16}, 16),
    ({"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 16, "attention_factor": 1.2}, 64),
]


@pytest.mark.parametrize(("table", "longest"), SCALINGS)
def test_frequencies_are_those_of_transformers(table, longest):
    theirs = transformers.LlamaConfig(head_dim=8, max_position_embeddings=64, rope_parameters={"rope_theta": 50.0, **table})
    expected, scale = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, seq_len=longest)
    ours = parse(head_dim=8, max_position_embeddings=64, rope_theta=50.0, rope_scaling=table).rope
    np.testing.assert_allclose(ours.frequencies(longest), expected.numpy(), rtol=2e-7)
    assert ours.scale == pytest.approx(scale, rel=1e-12)


def test_the_context_follows_the_scaling():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for positions, expected in ((40960, 131072), (32768, 131072), (163840, 163840)):
        config = parse(max_position_embeddings=positions, rope_scaling=yarn)
        assert (config.max_position_embeddings, config.longest_context) == (expected, expected)
    linear = parse(max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4.0})
    assert (linear.max_position_embeddings, linear.longest_context) == (4096, 4096)
    dynamic = parse(max_position_embeddings=4096, rope_scaling={"type": "dynamic", "factor": 2.5})
    assert (dynamic.max_position_embeddings, dynamic.longest_context) == (4096, 10240)
    assert dynamic.rope.scaling == Dynamic(2.5, 4096)
    assert (dynamic.depends_on_length, linear.depends_on_length) == (True, False)


def test_the_name_of_minimax_for_the_rotated_part_of_a_head():
    minimax = {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    assert parse(**minimax, num_key_value_heads=2, rotary_dim=8).rope.dim == 8
    assert parse(**minimax, num_key_value_heads=2, rotary_dim=8, partial_rotary_factor=0.25).rope.dim == 4
    assert parse(**minimax, num_key_value_heads=2).rope.dim == 16
    with pytest.raises(UnsupportedModel, match="does not give an even part of a head's 16 numbers"):
        parse(**minimax, num_key_value_heads=2, rotary_dim=24)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [False, True, True, True, True, True]),
        ({"moe_layer_end_index": -1}, [False, True, True, True, True, True]),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 4}, [False, False, True, True, True, False]),
        ({"moe_layer_start_index": 2, "moe_layer_interval": 2}, [False, False, False, True, False, True]),
    ],
)
def test_the_layers_of_ernie_that_have_experts(changes, expected):
    sizes = {"num_hidden_layers": 6, "num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
    config = parse(architectures=["Ernie4_5_MoeForCausalLM"], **sizes, **changes)
    assert config.experts.layers == tuple(expected)
    assert config.unread == ()


def test_queries_keys_and_values_have_biases_where_transformers_has_them():
    sizes = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts": 4}
    for name, changes, expected in (
        ("Glm4Moe", {}, (False, False)),
        ("Glm4Moe", {"attention_bias": True}, (True, False)),
        ("Qwen3Moe", {"attention_bias": True}, (True, True)),
        ("Qwen2", {"attention_bias": False}, (True, False)),
        ("Phi3", {"attention_bias": True}, (False, False)),
        ("SeedOss", {}, (True, False)),
        ("Glm", {}, (True, False)),
        ("InternLM3", {"model_type": "internlm3", "qkv_bias": True, "bias": True}, (True, True)),
        ("Llama", {"qkv_bias": True, "bias": True}, (False, False)),
    ):
        config = parse(architectures=[f"{name}ForCausalLM"], **sizes, **changes)
        assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (*expected, name == "InternLM3")
        assert ("bias" in config.unread) == (name == "Llama")


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"])
def test_heads_of_qwen_3_with_experts_have_the_usual_size_if_none_is_named(name):
    sizes = BASE | {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = {"text_config": sizes | {"model_type": "qwen3_vl_moe_text"}} if "VL" in name else {}
    assert ModelConfig.parse(sizes | {"architectures": [name]} | text).head_dim == 64 // 4


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        ({"hidden_act": "gelu", "hidden_activation": None}, True),
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, True),
        ({"hidden_act": "gelu", "hidden_activation": "gelu"}, False),
        ({"hidden_act": "silu"}, False),
    ],
)
def test_gemma_1_names_its_activation_in_the_ways_of_its_published_files(changes, ours):
    with contextlib.nullcontext() if ours else pytest.raises(NoNativeModel, match="has no code of ours"):
        assert parse(architectures=["GemmaForCausalLM"], num_key_value_heads=4, **changes).family.activation == "gelu_tanh"


def test_gemma_3_has_no_softcap_of_scores_even_if_its_config_names_one():
    named = {"num_key_value_heads": 4, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    for name, cap in (("Gemma2", 5.0), ("Gemma3", None)):
        config = parse(architectures=[f"{name}ForCausalLM"], **named)
        assert (config.scales.scores_cap, config.scales.logits_cap, config.unread) == (cap, 3.0, ())


def test_models_that_only_the_kernels_for_cpus_know_are_transformers_elsewhere(tmp_path):
    tiny_models.write("gemma4-moe", tmp_path)
    assert isinstance(load_shape(tmp_path), ModelConfig)
    elsewhere = load_shape(tmp_path, in_torch=True)
    assert not isinstance(elsewhere, ModelConfig)
    assert elsewhere.not_ours == "Gemma4ForCausalLM has code of ours for one process on a CPU alone"


def test_both_spellings_of_ropes_by_kind_of_layer_are_read():
    gemma = {"architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 4}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}, "sliding_attention": {"rope_theta": 500.0}}
    for config in (parse(**gemma, **old), parse(**gemma, rope_parameters=new)):
        assert config.rope == RopeConfig(dim=256, theta=2e6, scaling=Linear(8.0))
        assert config.local_rope == RopeConfig(dim=256, theta=500.0)


def test_a_checkpoint_says_its_dtype_in_one_of_two_words(tmp_path):
    for name in ("dtype", "torch_dtype"):
        (tmp_path / "config.json").write_text(json.dumps(BASE | {name: "bfloat16"}))
        assert ModelConfig.load(tmp_path).dtype == "bfloat16"


ROTATIONS = {"R1": ["weight_output", "weight_input"], "R3": ["k_cache"], "R4": ["weight_input", "input"]}
ROTATED = compressed("float-quantized", 8, "float", strategy="tensor") | {
    "transform_config": {"config_groups": {name: {"apply": [{"location": at} for at in places]} for name, places in ROTATIONS.items()}}
}


def test_rotations_that_weights_hold_need_no_code():
    groups = ROTATED["transform_config"]["config_groups"]
    assert parse(quantization_config=ROTATED | {"transform_config": {"config_groups": {"R1": groups["R1"]}}}).quantization is not None


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_the_second_layout_of_gptq_has_two_spellings(key):
    scheme = parse(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, key: "gptq_v2"}).scheme
    assert scheme is not None
    assert scheme.zero_offset == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MptForCausalLM"]},
            r"MptForCausalLM has no code of ours \(docs/models\.md lists what has\)",
        ),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, r"'spiral' has no code of ours \(there is for default, linear, dynamic, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor must be a positive number, got '4'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate must be true or false, got 1"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor must be a positive number, got None"),
        ({"rope_scaling": {"rope_type": "longrope", "long_mscale": 1.2}}, "'longrope' has no code of ours"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}}, r"low_freq_factor \(4.0\) must be less than"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "exaone"}, "the names that exaone gives tensors have no code of ours"),
        (HYBRID | {"num_key_value_heads": 2, "attention_bias": True}, "biases of gated attention have no code of ours"),
        ({"hidden_act": "gelu"}, "'gelu' has no code of ours"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"quantization_config": ROTATED}, r"transform_config rotates activations \(input, k_cache\), and there is no code for that"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "'gelu' has no code of ours"),
        ({"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": "30"}, "must be a positive number or null, got '30'"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, "must have 0 or 1 for each of 3 layers"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling must be a positive number"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.7}, "0.7 does not give an even part of a head's 16 numbers"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": float("inf")}, "inf does not give an even part"),
        ({"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 1e308}}, "must be at most 1, got 1e\\+308"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7},
            },
            "long_factor must be 8 positive numbers",
        ),
        ({**GEMMA4, "num_kv_shared_layers": 2}, "num_kv_shared_layers is 2: no earlier layer has full attention"),
        ({**GEMMA4, "num_kv_shared_layers": -1}, "num_kv_shared_layers must be a number that is not negative, got -1"),
        ({**GEMMA4, "enable_moe_block": True}, "num_experts must be a positive integer, got None"),
        ({**GEMMA4, **EXPERTS_BESIDE, "top_k_experts": 12}, "top_k_experts is 12, and there are 11 experts"),
        ({**GEMMA4, "per_layer_config": {"2": {"head_dim": 7}}}, "head_dim must be even for rotary positions, got 7"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be at most 10000, got 2147483647"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}}, "rope_theta must be more than 1 with YaRN, got 1"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number, got 'x'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number, got 1000"),
        (
            {"architectures": ["GraniteForCausalLM"], "logits_scaling": 10**400},
            "logits_scaling must be a positive number or null, got 1000",
        ),
        (CONVOLUTIONS | {"block_ffn_dim_multiplier": 1e308}, "block_ff_dim and block_ffn_dim_multiplier make inf of the inner size"),
        (CONVOLUTIONS | {"block_ffn_dim_multiplier": 1e-9}, "block_ff_dim and block_ffn_dim_multiplier make 6.4e-08 of the inner size"),
        (HYBRID | {"time_step_limit": [0.1, 10**400]}, "time_step_limit must be two ascending numbers"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 2**31}, "sliding_window must be a positive integer, got 2147483648"),
        ({"architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True}, "attention scores of other scales"),
        ({"architectures": ["GPT2LMHeadModel"], "scale_attn_weights": False}, "attention scores of other scales"),
        ({"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True}, "add_cross_attention"),
        ({"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "tanh"}, "hidden_act 'tanh' has no code of ours"),
        ({"architectures": ["OPTForCausalLM"], "do_layer_norm_before": False}, "as in OPT 350M"),
        ({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 8}, "as in OPT 350M"),
        ({"architectures": ["OPTForCausalLM"], "layer_norm_elementwise_affine": False}, "norms without weights have no code of ours"),
        ({"architectures": ["GPT2LMHeadModel"], "hidden_size": 60}, "heads of 15 numbers have no code of ours"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"hidden_size": 60, "num_attention_heads": 4}, "head_dim must be even"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        parse(**changes)


WRONG = ("x", -1, 0, True, 2**70, 1e400, [1], [[1]], [{}], {"a": 1}, {"full_attention": 3})
SIZES = BASE | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
SIZES |= {"shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "max_position_embeddings": 64, "type_vocab_size": 2}
SIZES |= {"enable_moe_block": True, "top_k_experts": 2}
NAMES = [*SIZES, "layer_types", "rms_norm_eps", "layer_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "text_config"]
NAMES += ["pad_token_id", "query_pre_attn_scalar", "id2label", "sentence_transformers", "sliding_window"]


DECODERS = ("LlamaForCausalLM", "Gemma4ForCausalLM", "GptOssForCausalLM", "GraniteMoeHybridForCausalLM", "SmolLM3ForCausalLM")


@pytest.mark.parametrize("family", [*DECODERS, "RobertaModel", "BertForSequenceClassification", "Gemma3TextModel"])
def test_no_value_of_a_config_fails_in_another_way_than_by_name(tmp_path, monkeypatch, family):
    """A message for the user, and no stack trace, whatever the type of a value."""
    for name, value in itertools.product(("num_key_value_heads", *NAMES), WRONG):
        raw = SIZES | {"architectures": [family], "use_bidirectional_attention": True, name: value}
        with contextlib.suppress(UnsupportedModel):
            if family in DECODERS:
                ModelConfig.parse(raw | {"use_bidirectional_attention": False})
            else:
                monkeypatch.setattr(encoder, "read_json", lambda _, raw=raw: raw)
                EncoderConfig.find(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("RobertaModel", {"pad_token_id": 64}, r"positions begin after pad_token_id \(64\), and there are 64"),
        ("BertModel", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be at most 10000"),
        ("BertModel", {"layer_norm_eps": 0}, "layer_norm_eps must be a positive number, got 0"),
        ("Gemma3TextModel", {"use_bidirectional_attention": True, "attn_logit_softcapping": 5.0}, "attn_logit_softcapping 5.0"),
        ("Gemma3TextModel", {"use_bidirectional_attention": True, "rope_theta": -1}, "rope_theta must be a positive number, got -1"),
    ],
)
def test_encoders_that_cannot_be_run_are_refused_by_name(tmp_path, family, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"architectures": [family]} | changes))
    with pytest.raises(UnsupportedModel, match=message):
        EncoderConfig.find(tmp_path)


@pytest.mark.parametrize("name", ["LLaMAForCausalLM", "PeftModelForCausalLM"])
def test_other_names_of_llama_in_published_files(name):
    assert ModelConfig.parse(BASE | {"architectures": [name], "model_type": "llama"}).architecture == "LlamaForCausalLM"


def test_entries_of_falcon_that_repeat_the_activation_are_known():
    assert parse(activation="swiglu", activation_function="silu").unread == ()


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ExaoneMoEForCausalLM", {**EXPERTS, "num_key_value_heads": 2, "sliding_window_pattern": 3}),
        ("Dots1ForCausalLM", {**EXPERTS, "num_experts": None, "n_routed_experts": 4, "scoring_func": "noaux_tc"}),
        (
            "HunYuanMoEV1ForCausalLM",
            {"num_experts": 4, "moe_topk": [2] * 3, "num_shared_expert": [1] * 3, "norm_topk_prob": True}
            | {"n_group": False, "topk_group": False, "group_limited_greedy": False, "routed_scaling_factor": False},
        ),
        ("AfmoeForCausalLM", {**EXPERTS, "num_key_value_heads": 2, "route_norm": True, "score_func": "sigmoid"}),
        ("Starcoder2ForCausalLM", {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "activation_function": "gelu"}),
    ],
)
def test_names_and_values_of_published_files_are_known(name, changes):
    model = parse(architectures=[name], **changes)
    assert model.unread == ()
    if model.experts:
        assert (model.experts.used, model.experts.groups) == (2, None)


def test_published_files_of_gpt_2_opt_and_pythia_have_names_of_their_own():
    shape = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_ctx": 128, "n_inner": None, "vocab_size": 100}
    rest = {"attn_pdrop": 0.1, "summary_type": "cls_index", "summary_use_proj": True, "layer_norm_epsilon": 1e-6}
    gpt2 = ModelConfig.parse({"architectures": ["GPT2LMHeadModel"], **shape, **rest, "activation_function": "gelu"})
    assert (gpt2.hidden_size, gpt2.intermediate_size, gpt2.num_layers, gpt2.num_heads, gpt2.max_position_embeddings) == (64, 256, 3, 4, 128)
    assert (gpt2.activation, gpt2.rms_norm_eps, gpt2.tie_word_embeddings, gpt2.uses_rope) == ("gelu", 1e-6, True, (False,) * 3)
    own = {
        "ffn_dim": 80,
        "hidden_act": "silu",
        "num_key_value_heads": 2,
        "do_layer_norm_before": True,
        "word_embed_proj_dim": 64,
        "layerdrop": 0.1,
        "activation_function": "relu",
    }
    opt = parse(architectures=["OPTForCausalLM"], _remove_final_layer_norm=False, prefix="</s>", **own)
    assert (opt.activation, opt.qkv_bias, opt.mlp_bias, opt.intermediate_size, opt.num_kv_heads) == ("relu", True, True, 80, 4)
    pythia = parse(architectures=["GPTNeoXForCausalLM"], rotary_pct=0.5, rotary_emb_base=500, hidden_act="gelu_fast")
    assert (pythia.rope, pythia.parallel, pythia.mlp_norm) == (RopeConfig(dim=8, theta=500.0), True, "post_attention_layernorm")
    assert parse(architectures=["GPTNeoXForCausalLM"]).rope.dim == 4
    assert (pythia.activation, parse(architectures=["GPTNeoXForCausalLM"]).activation) == ("gelu_new", "gelu")
    sizes = {"n_embd": 4096, "n_layer": 1, "n_head": 16, "vocab_size": 100, "rotary": True}
    gptj = ModelConfig.parse({"architectures": ["GPTJForCausalLM"], **sizes})
    assert gptj.rope.dim == CONFIG_MAPPING["gptj"]().rotary_dim
    plain = parse(architectures=["GPTNeoXForCausalLM"], attention_bias=False)
    assert (plain.qkv_bias, plain.output_bias, plain.mlp_bias) == (False, False, True)
    assert {model.unread for model in (gpt2, opt, pythia, gptj)} == {()}
    assert replace(gpt2, max_position_embeddings=129).num_weights == gpt2.num_weights + 64


def test_the_rotary_base_of_cohere2_is_transformers_where_config_json_is_silent():
    assert parse(architectures=["CohereForCausalLM"]).rope.theta == 500_000.0
    assert parse(architectures=["Cohere2ForCausalLM"]).rope.theta == 10_000.0


@pytest.mark.parametrize("name", [name for name, known in ARCHITECTURES.items() if known.mixture is not None and known.mixture.scale])
def test_the_factor_of_experts_is_transformers_where_config_json_is_silent(name):
    known = ARCHITECTURES[name]
    key, factor = known.mixture.scale
    assert getattr(CONFIG_MAPPING[known.model_type](), key) == factor


@pytest.mark.parametrize("modules", [3, [3], {"a": 1}, ["x"]])
def test_modules_that_are_no_list_of_objects_are_refused(tmp_path, modules):
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModel, match=r"modules\.json must be a list of objects"):
        encoder.find_modules(tmp_path)
    assert encoder.decoder_pooling(tmp_path) is None
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(modules))
    assert encoder.longest_text(tmp_path, parse()) == 2048


@pytest.mark.parametrize("path", ["../other", "1_Pooling/../../other", "/etc"])
def test_modules_outside_of_the_directory_are_refused(tmp_path, path):
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": path}]))
    with pytest.raises(UnsupportedModel, match=r"modules\.json names '.*', which is outside of the model's directory"):
        encoder.find_modules(tmp_path)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_the_longest_text_is_that_of_sentence_transformers(tmp_path, name):
    (tmp_path / name).write_text('{"max_seq_length": 7}')
    assert encoder.longest_text(tmp_path, parse()) == 7


@pytest.mark.parametrize("pooling", [{"pooling_mode": "cls"}, {"pooling_mode": ["cls"]}, {"pooling_mode_cls_token": True}])
def test_poolings_have_several_spellings(tmp_path, pooling):
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": f"1_{kind}"} for kind in ("Transformer", "Pooling", "Dropout")]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert encoder.find_modules(tmp_path).pooling == "cls"
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": ["cls", "mean"]}))
    with pytest.raises(UnsupportedModel, match="pooling by cls and mean is not supported"):
        encoder.find_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling | {"skip_punctuation": True}))
    with pytest.raises(UnsupportedModel, match="pooling with skip_punctuation True has no code of ours"):
        encoder.find_modules(tmp_path)


def test_settings_of_sentence_transformers_that_are_not_used_are_reported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"architectures": ["BertModel"], "max_position_embeddings": 64}))
    assert EncoderConfig.find(tmp_path).unread == ()
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls", "include_prompt": False}))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": ""}, "truncate_dim": 64}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "depth": 3}))
    files = "truncate_dim of config_sentence_transformers.json", "depth of sentence_bert_config.json"
    assert EncoderConfig.find(tmp_path).unread == (*files, "include_prompt of 1_Pooling/config.json")


@pytest.mark.parametrize(("name", "change"), [("residual", True), ("module_input_name", "token_embeddings")])
def test_layers_after_a_pooling_have_no_other_settings(tmp_path, name, change):
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Dense", "path": "2_Dense"}]))
    (tmp_path / "2_Dense").mkdir()
    usual = {"in_features": 4, "out_features": 2, "bias": False, "activation_function": "Tanh", "module_input_name": "sentence_embedding"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(usual))
    assert encoder.find_modules(tmp_path).dense == (encoder.DenseModule(path="2_Dense", ins=4, outs=2, bias=False, activation="tanh"),)
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(usual | {name: change}))
    with pytest.raises(UnsupportedModel, match=f"2_Dense with {name} .*{change}.* has no code of ours"):
        encoder.find_modules(tmp_path)


def test_directories_without_a_usable_config_are_refused(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no readable config\.json"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="not valid JSON"):
        ModelConfig.load(tmp_path)
