"""StableLM."""

from chairlift.architectures.architecture import Architecture, GGUFFormat

STABLELM = Architecture(
    name="StableLmForCausalLM",
    model_type="stablelm",
    models="StableLM 2 1.6B, StableLM 3B",
    aliases=("StableLMEpochForCausalLM",),
    gguf=GGUFFormat(names=("stablelm",), unused=("use_parallel_residual",)),
    max_positions=4096,
    norm_eps="layer_norm_eps",
    rms_norm_eps=1e-5,
    qkv_bias=("use_qkv_bias", False),
    output_bias=False,
    partial_rotary=True,
    rotary=0.25,
    centred=True,
    norm_biases=True,
)
