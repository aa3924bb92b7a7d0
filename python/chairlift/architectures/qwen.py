"""Qwen 2 and 3, and their mixtures of experts."""

from chairlift.architectures.architecture import Architecture, Code, GGUFFormat, Mixture, Projections, Windows

QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    models="Qwen2, Qwen2.5",
    gguf=GGUFFormat(names=("qwen2",)),
    kv_heads=32,
    windows=Windows.SWITCHED,
    qkv_bias=True,
    output_bias=False,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    models="Qwen3, Qwen3-Embedding, text of Qwen3-VL",
    wrappers=("Qwen3VLForConditionalGeneration",),
    text_types=("qwen3_vl_text",),
    gguf=GGUFFormat(names=("qwen3", "qwen3vl"), image_keys=("rope.dimension_sections", "n_deepstack_layers")),
    kv_heads=32,
    head_dim=128,
    windows=Windows.SWITCHED,
    qk_norm=True,
)
QWEN2_MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    code=Code.RUST,
    gguf=GGUFFormat(names=("qwen2moe",)),
    kv_heads=16,
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
    model_type="qwen3_moe",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    code=Code.RUST,
    gguf=GGUFFormat(names=("qwen3moe",), constants={"norm_topk_prob": True}),
    kv_heads=4,
    head_dim=128,
    qk_norm=True,
    mixture=Mixture(),
)
