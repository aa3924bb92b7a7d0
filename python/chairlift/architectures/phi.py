"""Phi-3 and Phi-4-mini."""

from chairlift.architectures.architecture import Architecture, Code, Projections, Windows

PHI3 = Architecture(
    name="Phi3ForCausalLM",
    models="Phi-3, Phi-4-mini",
    code=Code.RUST,
    max_positions=4096,
    rms_norm_eps=1e-5,
    projections=Projections(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    partial_rotary=True,
    windows=Windows.ALL,
)
