"""GLM-4 and GLM-Z1, and GLM-4.5, 4.6 and 4.7."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, GGUFFormat, Norms, Projections
from chairlift.architectures.deepseek import EXPERT_TENSORS, KEYS, NONE, SIGMOID

GLM = Architecture(
    name="GlmForCausalLM",
    model_type="glm",
    models="GLM-4-9B, GLM-Edge",
    kv_heads=2,
    head_dim=128,
    max_positions=131072,
    rms_norm_eps=1.5625e-07,
    qkv_bias=("attention_bias", True),
    output_bias=False,
    projections=Projections(gate_up=("mlp.gate_up_proj",)),
    adjacent_pairs=True,
    rotary=0.5,
)
GLM4 = replace(
    GLM,
    name="Glm4ForCausalLM",
    model_type="glm4",
    models="GLM-4-0414, GLM-Z1; text of GLM-4.1V and GLM-4.6V-Flash",
    wrappers=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
    text_types=("glm4v_text",),
    # Not unused: files with sections of positions have the rows of queries and keys in another order, and are refused.
    gguf=GGUFFormat(
        names=("glm4",),
        tensors={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    post_norms=True,
)
GLM4_MOE = Architecture(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7; Solar Open as GGUF; text of GLM-4.5V and GLM-4.6V",
    wrappers=("Glm4vMoeForConditionalGeneration",),
    text_types=("glm4v_moe_text",),
    defaults={"use_qk_norm": False},
    gguf=GGUFFormat(
        names=("glm4moe",),
        constants=NONE,
        keys=KEYS,
        unused=("rope.dimension_sections",),
        tensors={**EXPERT_TENSORS, "post_attention_norm": "post_attention_layernorm"},
    ),
    kv_heads=8,
    max_positions=131072,
    rms_norm_eps=1e-5,
    qkv_bias=("attention_bias", False),
    output_bias=False,
    qk_norm=True,
    rotary=0.5,
    mixture=replace(SIGMOID, dense=("first_k_dense_replace", 1), groups=(1, 1)),
)
SOLAR_OPEN = replace(
    GLM4_MOE,
    name="SolarOpenForCausalLM",
    model_type="solar_open",
    models="Solar Open",
    head_dim=128,
    wrappers=(),
    text_types=(),
    defaults={},
    gguf=None,
    theta=1e6,
    qk_norm=False,
    rotary=1.0,
    inner="moe_intermediate_size",
    mixture=replace(SIGMOID, dense=("first_k_dense_replace", 0), groups=(1, 1)),
)
