"""Qwen 2 and 3, and their mixtures of experts."""

from chairlift.architectures.architecture import Architecture, Code, GGUFFormat, Mixture, Projections, Windows

QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    gguf=GGUFFormat(names=("qwen2",), model_type="qwen2"),
    kv_heads=32,
    windows=Windows.SWITCHED,
    qkv_bias=True,
    output_bias=False,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    models="Qwen3",
    gguf=GGUFFormat(names=("qwen3",), model_type="qwen3"),
    kv_heads=32,
    head_dim=128,
    windows=Windows.SWITCHED,
    qk_norm=True,
)
QWEN2_MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    code=Code.RUST,
    gguf=GGUFFormat(names=("qwen2moe",), model_type="qwen2_moe"),
    kv_heads=16,
    windows=Windows.SWITCHED,
    qkv_bias=True,
    output_bias=False,
    mixture=Mixture(
        shared=Projections(
            gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            down="mlp.shared_expert.down_proj",
        ),
        shared_gate="mlp.shared_expert_gate",
    ),
)
QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    code=Code.RUST,
    gguf=GGUFFormat(names=("qwen3moe",), model_type="qwen3_moe", constants={"norm_topk_prob": True}),
    kv_heads=4,
    head_dim=128,
    windows=Windows.SWITCHED,
    qk_norm=True,
    mixture=Mixture(),
)
