"""GLM-4.5, 4.6 and 4.7."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, GGUFFormat
from chairlift.architectures.deepseek import KEYS, NONE, SIGMOID, TENSORS

GLM4_MOE = Architecture(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    gguf=GGUFFormat(
        names=("glm4moe",),
        constants=NONE,
        keys=KEYS,
        tensors={name: own for name, own in TENSORS.items() if not name.startswith("attn_")}
        | {"post_attention_norm": "post_attention_layernorm"},
    ),
    kv_heads=8,
    max_positions=131072,
    rms_norm_eps=1e-5,
    qkv_bias=("attention_bias", False),
    output_bias=False,
    qk_norm=True,
    partial_rotary=True,
    rotary=0.5,
    mixture=replace(SIGMOID, dense=("first_k_dense_replace", 1), groups=(1, 1)),
)
