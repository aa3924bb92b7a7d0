"""StableLM."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Norms

STABLELM = Architecture(
    name="StableLmForCausalLM",
    model_type="stablelm",
    models="StableLM 2 1.6B and 12B, StableLM 3B",
    aliases=("StableLMEpochForCausalLM",),
    entries={"qk_layernorm": "use_qk_norm"},
    gguf=GGUFFormat(names=("stablelm",), tensors={"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}),
    max_positions=4096,
    norm_eps="layer_norm_eps",
    rms_norm_eps=1e-5,
    qkv_bias=("use_qkv_bias", False),
    output_bias=False,
    norms=Norms(query="self_attn.q_layernorm", key="self_attn.k_layernorm"),
    rotary=0.25,
    centred=True,
    qk_norm=("use_qk_norm", False),
    parallel=("use_parallel_residual", False),
)
