"""EXAONE 4 and K-EXAONE."""

from dataclasses import replace

from chairlift.architectures.architecture import NORMS_AFTER, POST_NORMS, Architecture, GGUFFormat, Key, Norms, Windows
from chairlift.architectures.deepseek import KEYS, SHARED_TENSORS, SIGMOID

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
EXAONE_MOE = replace(
    EXAONE4,
    name="ExaoneMoeForCausalLM",
    model_type="exaone_moe",
    models="K-EXAONE-236B-A23B",
    aliases=("ExaoneMoEForCausalLM",),  # the first published files
    gguf=GGUFFormat(
        names=("exaone-moe",),
        constants={"first_k_dense_replace": 0, "num_shared_experts": 0},
        keys={
            "sliding_window": Key("attention.sliding_window", int),
            "first_k_dense_replace": KEYS["first_k_dense_replace"],
            "num_shared_experts": KEYS["n_shared_experts"],
            "routed_scaling_factor": KEYS["routed_scaling_factor"],
        },
        tensors={**SHARED_TENSORS, "exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
    norms=Norms(),
    post_norms=False,
    mixture=replace(
        SIGMOID,
        choice_bias="mlp.e_score_correction_bias",
        count="num_experts",
        shared_count=("num_shared_experts", 1),
        scale=("routed_scaling_factor", 2.5),
        dense=("first_k_dense_replace", 1),
        groups=(1, 1),
    ),
)
