"""Command R, Aya, Command R7B and Command A."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, GGUFFormat, Key, Windows

COHERE = Architecture(
    name="CohereForCausalLM",
    model_type="cohere",
    models="Command R and R+, Aya 23 and Aya Expanse",
    gguf=GGUFFormat(names=("command-r",), keys={"logit_scale": Key("logit_scale", float)}),
    max_positions=8192,
    norm_eps="layer_norm_eps",
    rms_norm_eps=1e-5,
    tied=True,
    theta=500_000.0,
    qk_norm=("use_qk_norm", False),
    centred=True,
    norm_biases=False,
    parallel=True,
    adjacent_pairs=True,
    logit_scale=0.0625,
)
COHERE2 = replace(
    COHERE,
    name="Cohere2ForCausalLM",
    model_type="cohere2",
    models="Command R7B, Command A, Tiny Aya",
    gguf=GGUFFormat(
        names=("cohere2",), keys={"logit_scale": Key("logit_scale", float), "sliding_window": Key("attention.sliding_window", int)}
    ),
    theta=10_000.0,
    qk_norm=False,
    window_rotary=True,
    windows=Windows.LISTED,
    sliding_window=4096,
    window_interval=4,
)
