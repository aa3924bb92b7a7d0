"""OLMoE, OLMo 2, OLMo 3 and FlexOlmo."""

from dataclasses import replace

from chairlift.architectures.architecture import NORMS_AFTER, POST_NORMS, Architecture, GGUFFormat, Key, Mixture, Windows

OLMOE = Architecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    models="OLMoE",
    gguf=GGUFFormat(names=("olmoe",)),
    max_positions=4096,
    rms_norm_eps=1e-5,
    qk_norm=True,
    whole_norms=True,
    mixture=Mixture(inner="intermediate_size"),
)
OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    models="OLMo 2",
    gguf=GGUFFormat(names=("olmo2",), tensors=POST_NORMS),
    max_positions=2048,
    rms_norm_eps=1e-5,
    qk_norm=True,
    whole_norms=True,
    norms=NORMS_AFTER,
    post_norms=True,
)
OLMO3 = replace(
    OLMO2,
    name="Olmo3ForCausalLM",
    model_type="olmo3",
    models="OLMo 3",
    gguf=GGUFFormat(
        names=("olmo2",),
        keys={
            "sliding_window": Key("attention.sliding_window", int),
            "rope_local_base_freq": Key("rope.freq_base_swa", float, optional=True),
        },
        tensors=POST_NORMS,
    ),
    theta=500_000.0,
    local_theta=500_000.0,
    windows=Windows.LISTED,
    sliding_window=4096,
    window_interval=4,
)
"""Its GGUF files have OLMo 2's name, and windows."""
FLEX_OLMO = replace(
    OLMO2,
    name="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    models="FlexOlmo",
    gguf=None,
    max_positions=4096,
    rms_norm_eps=1e-6,
    theta=500_000.0,
    mixture=OLMOE.mixture,
)
