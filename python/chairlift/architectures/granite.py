"""Granite 3, and Granite 4 without experts and state-space layers."""

from chairlift.architectures.architecture import Architecture, Code, GGUFFormat, Key, Projections

GRANITE = Architecture(
    name="GraniteForCausalLM",
    models="Granite 3; dense Granite 4 as GGUF",
    code=Code.RUST,
    gguf=GGUFFormat(
        names=("granite",),
        model_type="granite",
        keys={
            "attention_multiplier": Key("attention.scale", float, 1.0),
            "embedding_multiplier": Key("embedding_scale", float, 1.0),
            "residual_multiplier": Key("residual_scale", float, 1.0),
            "logits_scaling": Key("logit_scale", float, 1.0),
        },
        adjacent_pairs=True,
    ),
    max_positions=2048,
    mlp_bias=True,
    multipliers=True,
)
GRANITE4 = Architecture(
    name="GraniteMoeHybridForCausalLM",
    models="Granite 4 without experts and state-space layers",
    code=Code.RUST,
    max_positions=2048,
    inner="shared_intermediate_size",
    projections=Projections(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
    multipliers=True,
)
