"""Architectures that transformers' code alone computes, and whose GGUF files are read for it."""

from chairlift.architectures.architecture import POST_NORMS, Architecture, Code, GGUFFormat, Key, Windows

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
