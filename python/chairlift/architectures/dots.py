"""dots.llm1."""

from dataclasses import replace

from chairlift.architectures.architecture import Architecture, GGUFFormat, Windows
from chairlift.architectures.deepseek import EXPERT_TENSORS, KEYS, NONE, SIGMOID

DOTS1 = Architecture(
    name="Dots1ForCausalLM",
    model_type="dots1",
    models="dots.llm1",
    gguf=GGUFFormat(
        names=("dots1",),
        constants=NONE,
        keys=KEYS,
        tensors=EXPERT_TENSORS,
    ),
    max_positions=2048,
    windows=Windows.SWITCHED,
    qk_norm=True,
    mixture=replace(
        SIGMOID,
        shared_count=("n_shared_experts", 0),
        dense=("first_k_dense_replace", 0),
        normalised=("norm_topk_prob", False),
        groups=(1, 1),
    ),
)
