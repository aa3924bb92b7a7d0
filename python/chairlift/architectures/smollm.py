"""SmolLM3."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Windows

SMOLLM3 = Architecture(
    name="SmolLM3ForCausalLM",
    model_type="smollm3",
    models="SmolLM3",
    gguf=GGUFFormat(names=("smollm3",), adjacent_pairs=True),
    kv_heads=4,
    theta=2e6,
    tied=True,
    windows=Windows.SWITCHED,
    mlp_bias=False,
    no_rope_interval=4,
)
