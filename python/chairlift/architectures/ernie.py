"""ERNIE 4.5 with and without experts."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, GGUFFormat, Key
from chairlift.architectures.deepseek import SHARED_TENSORS, SOFTMAX

ERNIE4_5 = Architecture(
    name="Ernie4_5ForCausalLM",
    aliases=("Ernie4_5_ForCausalLM",),
    model_type="ernie4_5",
    models="ERNIE 4.5 0.3B",
    gguf=GGUFFormat(names=("ernie4_5",)),
    head_dim=128,
    max_positions=131072,
    rms_norm_eps=1e-5,
    tied=True,
    theta=500_000.0,
    adjacent_pairs=True,
)
ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="Ernie4_5_MoeForCausalLM",
    aliases=(),
    model_type="ernie4_5_moe",
    models="ERNIE 4.5 21B-A3B, 300B-A47B",
    gguf=GGUFFormat(
        names=("ernie4_5-moe",),
        keys={
            "moe_layer_start_index": Key("leading_dense_block_count", int, optional=True),
            "moe_num_shared_experts": Key("expert_shared_count", int, optional=True),
        },
        constants={"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
        tensors={**SHARED_TENSORS, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    head_dim=None,
    mixture=replace(
        SOFTMAX,
        choice_bias="mlp.moe_statics.e_score_correction_bias",
        count="moe_num_experts",
        used="moe_k",
        shared_count=("moe_num_shared_experts", 2),
        scale=None,
        dense=("moe_layer_start_index", 1),
        normalised=True,
        best=None,
    ),
)
