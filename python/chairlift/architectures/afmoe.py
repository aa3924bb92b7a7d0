"""Arcee's Trinity."""

from dataclasses import replace

from chairlift.architectures.architecture import POST_NORMS, Architecture, GGUFFormat, Key, Norms, Projections, Windows
from chairlift.architectures.deepseek import KEYS, SHARED_TENSORS, SIGMOID

AFMOE = Architecture(
    name="AfmoeForCausalLM",
    model_type="afmoe",
    models="Trinity Nano, Mini and Large",
    gguf=GGUFFormat(
        names=("afmoe",),
        constants={"num_dense_layers": 0, "mup_enabled": True},
        keys={
            "sliding_window": Key("attention.sliding_window", int),
            "num_dense_layers": KEYS["first_k_dense_replace"],
            "num_shared_experts": Key("expert_shared_count", int, 0),
            "route_scale": KEYS["routed_scaling_factor"],
        },
        tensors={
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": POST_NORMS["post_attention_norm"],
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            **SHARED_TENSORS,
            "exp_probs_b.bias": "mlp.expert_bias",
        },
    ),
    head_dim=128,
    max_positions=16384,
    rms_norm_eps=1e-5,
    projections=Projections(gate="self_attn.gate_proj"),
    norms=Norms(mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm"),
    windows=Windows.LISTED,
    sliding_window=1024,
    window_interval=4,
    window_rotary=True,
    qk_norm=True,
    post_norms=True,
    scaled_embeddings=("mup_enabled", False),
    gated_attention=True,
    mixture=replace(
        SIGMOID,
        router="mlp.router.gate",
        choice_bias="mlp.expert_bias",
        count="num_experts",
        shared_count=("num_shared_experts", 2),
        scale=("route_scale", 1.0),
        dense=("num_dense_layers", 1),
        normalised=("route_norm", True),
        groups=(1, 1),
    ),
)
