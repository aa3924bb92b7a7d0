"""Granite 3 with and without experts, and Granite 4 without experts and state-space layers."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, Code, GGUFFormat, Key, Mixture, Projections, Scores

KEYS = {
    "attention_multiplier": Key("attention.scale", float, 1.0),
    "embedding_multiplier": Key("embedding_scale", float, 1.0),
    "residual_multiplier": Key("residual_scale", float, 1.0),
    "logits_scaling": Key("logit_scale", float, 1.0),
}

GRANITE = Architecture(
    name="GraniteForCausalLM",
    model_type="granite",
    models="Granite 3; dense Granite 4 as GGUF",
    code=Code.RUST,
    gguf=GGUFFormat(
        names=("granite",),
        keys=KEYS,
        adjacent_pairs=True,
    ),
    max_positions=2048,
    mlp_bias=True,
    position_type="rope",
    multipliers=True,
)
GRANITE4 = Architecture(
    name="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    models="Granite 4 without experts and state-space layers",
    code=Code.RUST,
    max_positions=2048,
    inner="shared_intermediate_size",
    projections=Projections(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
    position_type="nope",
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
GRANITE_MOE = Architecture(
    name="GraniteMoeForCausalLM",
    model_type="granitemoe",
    models="Granite 3 with experts",
    code=Code.RUST,
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
    code=Code.RUST,
    max_positions=2048,
    multipliers=True,
    mixture=replace(EXPERTS, shared=GRANITE4.projections),
)
