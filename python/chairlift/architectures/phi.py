"""Phi-3 and Phi-4-mini."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Key, Projections, Windows

PHI3 = Architecture(
    name="Phi3ForCausalLM",
    model_type="phi3",
    models="Phi-3, Phi-4-mini",
    gguf=GGUFFormat(
        names=("phi3",),
        keys={"sliding_window": Key("attention.sliding_window", int, optional=True)},
        tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    max_positions=4096,
    rms_norm_eps=1e-5,
    output_bias=False,
    projections=Projections(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    partial_rotary=True,
    windows=Windows.ALL,
)
