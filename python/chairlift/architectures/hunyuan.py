"""Hunyuan, dense and with experts."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, GGUFFormat, Key, Mixture, Norms, Projections

TENSORS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}

HUNYUAN_DENSE = Architecture(
    name="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    models="Hunyuan 0.5B to 7B, Hunyuan-MT",
    gguf=GGUFFormat(names=("hunyuan-dense",), tensors=TENSORS),
    max_positions=2048,
    rms_norm_eps=1e-5,
    qk_norm=True,
    rotated_first=True,
    alpha=True,
    norms=Norms(query="self_attn.query_layernorm", key="self_attn.key_layernorm"),
)
HUNYUAN_MOE = replace(
    HUNYUAN_DENSE,
    name="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    models="Hunyuan-A13B",
    gguf=GGUFFormat(
        names=("hunyuan-moe",),
        tensors={
            **TENSORS,
            "ffn_gate_inp": "mlp.gate.wg",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        keys={"num_shared_expert": Key("expert_shared_count", int, 1)},
    ),
    mixture=Mixture(
        router="mlp.gate.wg",
        shared=Projections(
            gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
            down="mlp.shared_mlp.down_proj",
        ),
        used="moe_topk",
        inner="intermediate_size",
        shared_count=("num_shared_expert", 1),
        normalised=True,
    ),
)
