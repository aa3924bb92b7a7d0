"""EXAONE 4."""

from chairlift.architectures.architecture import NORMS_AFTER, POST_NORMS, Architecture, GGUFFormat, Key, Windows

EXAONE4 = Architecture(
    name="Exaone4ForCausalLM",
    model_type="exaone4",
    models="EXAONE 4.0",
    gguf=GGUFFormat(
        names=("exaone4",),
        constants={"sliding_window": None},
        keys={"sliding_window": Key("attention.sliding_window", int, optional=True)},
        tensors=POST_NORMS,
    ),
    kv_heads=32,
    max_positions=2048,
    rms_norm_eps=1e-5,
    output_bias=False,
    windows=Windows.LISTED,
    sliding_window=4096,
    window_interval=4,
    window_rotary=True,
    qk_norm=True,
    norms=NORMS_AFTER,
    post_norms=True,
)
