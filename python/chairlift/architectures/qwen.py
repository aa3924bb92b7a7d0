"""Qwen 2 and 3, their mixtures of experts, Mellum, and the hybrid models Qwen3-Next, 3.5 and 3.6."""

from dataclasses import replace

from chairlift.architectures.architecture import (
    TOP,
    Architecture,
    GGUFFormat,
    Key,
    Mixture,
    Projections,
    Recurrence,
    RecurrentKind,
    Windows,
)

SHARED = Projections(gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), down="mlp.shared_expert.down_proj")

QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    models="Qwen2, Qwen2.5, MiMo-7B, text of Qwen2-VL, Qwen2.5-VL and InternVL",
    aliases=("MiMoForCausalLM",),
    wrappers=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "InternVLForConditionalGeneration"),
    text_types=("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    gguf=GGUFFormat(names=("qwen2", "qwen2vl"), unused=("rope.dimension_sections",)),
    kv_heads=32,
    windows=Windows.SWITCHED,
    qkv_bias=("qkv_bias", True),
    output_bias=False,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    models="Qwen3, Qwen3-Embedding, Qwen3-Reranker, text of Qwen3-VL and InternVL",
    wrappers=("Qwen3VLForConditionalGeneration", "InternVLForConditionalGeneration"),
    text_types=("qwen3_vl_text", "qwen3"),
    gguf=GGUFFormat(
        names=("qwen3", "qwen3vl"), unused=("rope.dimension_sections", "n_deepstack_layers"), top={**TOP, "cls.output": "score"}
    ),
    kv_heads=32,
    head_dim=128,
    windows=Windows.SWITCHED,
    qk_norm=True,
)
QWEN2_MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    gguf=GGUFFormat(names=("qwen2moe",)),
    kv_heads=16,
    qkv_bias=("qkv_bias", True),
    output_bias=False,
    mixture=Mixture(
        shared=SHARED,
        shared_gate="mlp.shared_expert_gate",
    ),
)
QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    gguf=GGUFFormat(
        names=("qwen3moe", "qwen3vlmoe"),
        constants={"norm_topk_prob": True},
        unused=("rope.dimension_sections", "n_deepstack_layers"),
    ),
    kv_heads=4,
    qk_norm=True,
    mixture=Mixture(),
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe_text",
    models="text of Qwen3-VL with experts",
    wrappers=("Qwen3VLMoeForConditionalGeneration",),
    text_types=("qwen3_vl_moe_text",),
    gguf=None,
    theta=500_000.0,
    mixture=Mixture(both="mlp.experts.gate_up_proj", transposed="mlp.experts.down_proj", normalised=True),
)
MELLUM = replace(
    QWEN3_MOE,
    name="MellumForCausalLM",
    model_type="mellum",
    models="Mellum 2",
    gguf=None,
    head_dim=128,
    theta=500_000.0,
    local_theta=10_000.0,
    windows=Windows.LISTED,
    sliding_window=1024,
    window_interval=1,
    mixture=Mixture(normalised=("norm_topk_prob", True), dense=("first_k_dense_replace", 0)),
)
HYBRID_KEYS = {
    "linear_conv_kernel_dim": Key("ssm.conv_kernel", int),
    "linear_key_head_dim": Key("ssm.state_size", int),
    "linear_num_key_heads": Key("ssm.group_count", int),
    "linear_num_value_heads": Key("ssm.time_step_rank", int),
}
HYBRID_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    ".ssm_a": "linear_attn.A",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA = Recurrence(
    kind=RecurrentKind.DELTA,
    types=("linear_attention",),
    prefix="linear_attn.",
    taps=("linear_conv_kernel_dim", 4),
    count=("linear_num_value_heads", 32),
    groups=("linear_num_key_heads", 16),
    key_size=("linear_key_head_dim", 128),
    value_size=("linear_value_head_dim", 128),
    interval=("full_attention_interval", 4),
)
QWEN3_NEXT = Architecture(
    name="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    models="Qwen3-Next, Qwen3-Coder-Next",
    gguf=GGUFFormat(names=("qwen3next",), constants={"norm_topk_prob": True}, keys=HYBRID_KEYS, tensors=HYBRID_TENSORS, stored_offset=1.0),
    kv_heads=2,
    head_dim=256,
    rotary=0.25,
    qk_norm=True,
    norm_offset=1.0,
    gated_attention=True,
    recurrence=DELTA,
    mixture=Mixture(shared=SHARED, shared_gate="mlp.shared_expert_gate", normalised=("norm_topk_prob", True)),
)
QWEN3_5_GGUF = GGUFFormat(
    names=("qwen35",),
    constants={"linear_heads_tiled": True},
    keys=HYBRID_KEYS,
    unused=("rope.dimension_sections", "n_deepstack_layers"),
    tensors=HYBRID_TENSORS,
    stored_offset=1.0,
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    models="Qwen3.5, Qwen3.6",
    wrappers=("Qwen3_5ForConditionalGeneration",),
    text_types=("qwen3_5_text",),
    gguf=QWEN3_5_GGUF,
    kv_heads=4,
    mixture=None,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    models="Qwen3.5 and Qwen3.6 with experts",
    wrappers=("Qwen3_5MoeForConditionalGeneration",),
    text_types=("qwen3_5_moe_text",),
    gguf=replace(QWEN3_5_GGUF, names=("qwen35moe",)),
    kv_heads=2,
    mixture=Mixture(shared=SHARED, shared_gate="mlp.shared_expert_gate", normalised=True),
)
