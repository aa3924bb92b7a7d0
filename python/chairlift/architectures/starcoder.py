"""StarCoder2."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Projections, Windows

STARCODER2 = Architecture(
    name="Starcoder2ForCausalLM",
    model_type="starcoder2",
    models="StarCoder2",
    gguf=GGUFFormat(
        names=("starcoder2",),
        constants={"hidden_act": "gelu_pytorch_tanh"},
        tensors={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    kv_heads=2,
    max_positions=4096,
    norm_eps="norm_epsilon",
    rms_norm_eps=1e-5,
    tied=True,
    biases=("use_bias", True),
    projections=Projections(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    windows=Windows.ALL,
    centred=True,
    activation="gelu_new",
)
