"""Phi-1, Phi-1.5 and Phi-2, Phi-3 and Phi-4-mini."""

from chairlift.architectures.architecture import TOP, Architecture, GGUFFormat, Key, Norms, Projections, Windows

PHI = Architecture(
    name="PhiForCausalLM",
    model_type="phi",
    models="Phi-1, Phi-1.5, Phi-2",
    gguf=GGUFFormat(
        names=("phi2",),
        constants={"hidden_act": "gelu_new"},
        tensors={"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top={**TOP, "output_norm": "model.final_layernorm"},
    ),
    max_positions=2048,
    norm_eps="layer_norm_eps",
    rms_norm_eps=1e-5,
    biases=("attention_bias", True),
    head_bias=True,
    projections=Projections(fused="self_attn.qkv_proj", output="self_attn.dense", gate_up=("mlp.fc1",), down="mlp.fc2"),
    norms=Norms(last="model.final_layernorm"),
    rotary=0.5,
    centred=True,
    parallel=True,
    activation="gelu_new",
)
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
    rotary=1.0,
    windows=Windows.ALL,
)
