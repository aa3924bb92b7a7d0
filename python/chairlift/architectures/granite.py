"""Granite 3 with and without experts, and Granite 4 with and without experts and state spaces."""

from dataclasses import replace

from chairlift.architectures.architecture import (
    Architecture,
    GGUFFormat,
    Key,
    Mixture,
    Projections,
    Recurrence,
    RecurrentKind,
    Scores,
)

KEYS = {
    "attention_multiplier": Key("attention.scale", float, optional=True),
    "embedding_multiplier": Key("embedding_scale", float, 1.0),
    "residual_multiplier": Key("residual_scale", float, 1.0),
    "logits_scaling": Key("logit_scale", float, 1.0),
}

GRANITE = Architecture(
    name="GraniteForCausalLM",
    model_type="granite",
    models="Granite 3; dense Granite 4 as GGUF",
    gguf=GGUFFormat(
        names=("granite",),
        keys=KEYS,
        adjacent_pairs=True,
    ),
    max_positions=2048,
    mlp_bias=False,
    position_type="rope",
    multipliers=True,
)
EXPERTS = Mixture(
    router="block_sparse_moe.router.layer",
    gate_up="block_sparse_moe.{}.input_linear",
    down="block_sparse_moe.{}.output_linear",
    count="num_local_experts",
    inner="intermediate_size",
    shared_inner="shared_intermediate_size",
    scores=Scores.LOGITS,
)
SHARED = Projections(
    gate_up=("shared_mlp.input_linear",), apart=("shared_mlp.gate_proj", "shared_mlp.up_proj"), down="shared_mlp.output_linear"
)
GRANITE4 = Architecture(
    name="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    models="Granite 4",
    gguf=GGUFFormat(
        names=("granitehybrid",),
        keys={
            **KEYS,
            "mamba_n_heads": Key("ssm.time_step_rank", int),
            "mamba_n_groups": Key("ssm.group_count", int),
            "mamba_d_state": Key("ssm.state_size", int),
            "mamba_d_conv": Key("ssm.conv_kernel", int),
        },
        tensors={
            "ffn_gate_inp": EXPERTS.router,
            "ffn_down_exps": "block_sparse_moe.output_linear",
            **dict.fromkeys(("ffn_gate", "ffn_gate_shexp"), SHARED.apart[0]),
            **dict.fromkeys(("ffn_up", "ffn_up_shexp"), SHARED.apart[1]),
            **dict.fromkeys(("ffn_down", "ffn_down_shexp"), SHARED.down),
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_dt.bias": "mamba.dt_bias",
            ".ssm_a": "mamba.A",
            ".ssm_d": "mamba.D",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
        adjacent_pairs=True,
    ),
    max_positions=2048,
    inner="shared_intermediate_size",
    projections=SHARED,
    position_type="nope",
    multipliers=True,
    recurrence=Recurrence(
        kind=RecurrentKind.SPACE,
        types=("mamba", "linear_attention"),
        prefix="mamba.",
        taps=("mamba_d_conv", 4),
        count=("mamba_n_heads", 128),
        groups=("mamba_n_groups", 1),
        key_size=("mamba_d_state", 256),
        value_size=("mamba_d_head", None),
        conv_bias=("mamba_conv_bias", True),
        bias=("mamba_proj_bias", False),
    ),
    mixture=replace(EXPERTS, shared=SHARED, optional=True),
)
GRANITE_MOE = Architecture(
    name="GraniteMoeForCausalLM",
    model_type="granitemoe",
    models="Granite 3 with experts",
    gguf=GGUFFormat(
        names=("granitemoe",),
        keys=KEYS,
        tensors={"ffn_gate_inp": EXPERTS.router, "ffn_down_exps": "block_sparse_moe.output_linear"},
        adjacent_pairs=True,
    ),
    max_positions=2048,
    multipliers=True,
    mixture=EXPERTS,
)
GRANITE_MOE_SHARED = Architecture(
    name="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    models="Granite 3 with experts and a shared one",
    max_positions=2048,
    multipliers=True,
    mixture=replace(EXPERTS, shared=SHARED),
)
