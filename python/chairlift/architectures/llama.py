"""Llama and Mistral."""

from chairlift.architectures.architecture import Architecture, GGUFFormat, Windows

LLAMA = Architecture(
    name="LlamaForCausalLM",
    models="Llama 2 and 3, SmolLM2, TinyLlama; Mistral's GGUF files",
    gguf=GGUFFormat(names=("llama",), model_type="llama", adjacent_pairs=True),
    max_positions=2048,
    mlp_bias=True,
)
MISTRAL = Architecture(
    name="MistralForCausalLM",
    models="Mistral 7B",
    kv_heads=8,
    max_positions=131072,
    windows=Windows.ALL,
    sliding_window=4096,
    output_bias=False,
)
