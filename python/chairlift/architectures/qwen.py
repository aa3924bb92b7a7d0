"""Qwen 2 and 3."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Windows

QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    gguf=GGUFFormat(names=("qwen2",), model_type="qwen2"),
    kv_heads=32,
    windows=Windows.SWITCHED,
    qkv_bias=True,
    output_bias=False,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    models="Qwen3",
    gguf=GGUFFormat(names=("qwen3",), model_type="qwen3"),
    kv_heads=32,
    head_dim=128,
    windows=Windows.SWITCHED,
    qk_norm=True,
)
