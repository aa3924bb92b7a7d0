"""DeepSeek V2 and V3, GLM-4.7-Flash and Youtu-LLM: attention to latents, and experts in all but the last."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, GGUFFormat, Key, Mixture, Projections, Scores

SHARED_TENSORS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""Those of shared experts."""
EXPERT_TENSORS = {**SHARED_TENSORS, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
TENSORS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    **EXPERT_TENSORS,
}
NONE = {"first_k_dense_replace": 0, "n_shared_experts": 0}
"""What a file means that has no such keys."""
KEYS = {
    "first_k_dense_replace": Key("leading_dense_block_count", int, optional=True),
    "n_shared_experts": Key("expert_shared_count", int, optional=True),
    "routed_scaling_factor": Key("expert_weights_scale", float, 1.0),
    "n_group": Key("expert_group_count", int, 1),
    "topk_group": Key("expert_group_used_count", int, 1),
}

SOFTMAX = Mixture(
    shared=Projections(gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), down="mlp.shared_experts.down_proj"),
    count="n_routed_experts",
    shared_count=("n_shared_experts", 2),
    scale=("routed_scaling_factor", 1.0),
    dense=("first_k_dense_replace", 0),
    normalised=False,
    best=1,
)
SIGMOID = replace(
    SOFTMAX,
    scores=Scores.SIGMOID,
    choice_bias="mlp.gate.e_score_correction_bias",
    shared_count=("n_shared_experts", 1),
    dense=("first_k_dense_replace", 3),
    normalised=("norm_topk_prob", True),
    groups=(8, 4),
    best=2,
)

DEEPSEEK_V2 = Architecture(
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    models="DeepSeek-V2, DeepSeek-V2-Lite",
    gguf=GGUFFormat(names=("deepseek2",), constants={**NONE, "topk_method": "group_limited_greedy"}, keys=KEYS, tensors=TENSORS),
    latent=True,
    mixture=SOFTMAX,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    models="DeepSeek-V3, DeepSeek-R1; GLM-4.7-Flash as GGUF",
    gguf=GGUFFormat(names=("deepseek2",), constants=NONE, keys=KEYS, tensors=TENSORS),
    mixture=replace(SIGMOID, scale=("routed_scaling_factor", 2.5)),
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    models="GLM-4.7-Flash",
    gguf=None,
    rms_norm_eps=1e-5,
    mixture=replace(SIGMOID, scale=("routed_scaling_factor", 1.8), dense=("first_k_dense_replace", 1), groups=(1, 1)),
)
YOUTU = replace(
    DEEPSEEK_V3,
    name="YoutuForCausalLM",
    model_type="youtu",
    models="Youtu-LLM-2B",
    gguf=GGUFFormat(
        names=("deepseek2",),
        keys={
            "first_k_dense_replace": Key("leading_dense_block_count", int, optional=True),
            "moe_intermediate_size": Key("expert_feed_forward_length", int, optional=True),
        },
        tensors=TENSORS,
    ),
    max_positions=131072,
    tied=True,
    mixture=None,
)
"""Its GGUF files have DeepSeek's name, and no experts."""
