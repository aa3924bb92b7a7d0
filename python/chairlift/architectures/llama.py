"""Llama, Mistral and Ministral."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Windows

LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    models="Llama 2 and 3, SmolLM2, TinyLlama; Mistral 7B as GGUF",
    gguf=GGUFFormat(names=("llama",), adjacent_pairs=True),
    max_positions=2048,
    mlp_bias=True,
)
MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    models="Mistral 7B, Mistral Small 3",
    wrappers=("Mistral3ForConditionalGeneration",),
    text_types=("mistral",),
    kv_heads=8,
    max_positions=131072,
    windows=Windows.ALL_UNLESS_LISTED,
    sliding_window=4096,
    output_bias=False,
)
MINISTRAL3 = Architecture(
    name="Ministral3ForCausalLM",
    model_type="ministral3",
    models="Ministral 3; Mistral Small 3 as GGUF",
    wrappers=("Mistral3ForConditionalGeneration",),
    text_types=("ministral3",),
    gguf=GGUFFormat(names=("mistral3",), adjacent_pairs=True),
    kv_heads=8,
    head_dim=128,
    max_positions=262144,
    rms_norm_eps=1e-5,
    theta=1e6,
    output_bias=False,
    windows=Windows.ALL,
    temperature=True,
)
