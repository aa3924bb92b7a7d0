"""Architectures that transformers' code alone computes, and whose GGUF files are read for it."""

from chairlift.architectures.architecture import POST_NORMS, Architecture, Code, GGUFFormat, Key, Windows

GLM4 = Architecture(
    name="Glm4ForCausalLM",
    model_type="glm4",
    models="GLM-4-0414, GLM-Z1",
    code=Code.TRANSFORMERS,
    gguf=GGUFFormat(
        names=("glm4",),
        tensors={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    qkv_bias=("attention_bias", True),
    partial_rotary=True,
    post_norms=True,
)
ERNIE4_5 = Architecture(
    name="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    models="ERNIE 4.5 0.3B",
    code=Code.TRANSFORMERS,
    gguf=GGUFFormat(names=("ernie4_5",), constants={"use_bias": False}),
)
HUNYUAN_DENSE = Architecture(
    name="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    models="Hunyuan 0.5B to 7B",
    code=Code.TRANSFORMERS,
    gguf=GGUFFormat(
        names=("hunyuan-dense",), tensors={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    ),
    qk_norm=True,
)
EXAONE4 = Architecture(
    name="Exaone4ForCausalLM",
    model_type="exaone4",
    models="EXAONE 4.0 1.2B",
    code=Code.TRANSFORMERS,
    gguf=GGUFFormat(
        names=("exaone4",),
        constants={"sliding_window": None},
        tensors=POST_NORMS,
    ),
    windows=Windows.LISTED,
    window_interval=1,
    qk_norm=True,
    post_norms=True,
)
COHERE = Architecture(
    name="CohereForCausalLM",
    model_type="cohere",
    models="Command R, Command R+, Aya",
    code=Code.TRANSFORMERS,
    gguf=GGUFFormat(names=("command-r",), keys={"logit_scale": Key("logit_scale", float)}),
    norm_eps="layer_norm_eps",
    qk_norm=True,
)
COHERE2 = Architecture(
    name="Cohere2ForCausalLM",
    model_type="cohere2",
    models="Command R7B, Command A",
    code=Code.TRANSFORMERS,
    gguf=GGUFFormat(
        names=("cohere2",), keys={"logit_scale": Key("logit_scale", float), "sliding_window": Key("attention.sliding_window", int)}
    ),
    norm_eps="layer_norm_eps",
    windows=Windows.LISTED,
    window_interval=4,
)
