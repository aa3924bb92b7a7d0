"""Model shapes: well-known models by name, others from their config.json or GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chairlift.errors import ModelNotFound
from chairlift.models.config import ModelConfig, load_shape
from chairlift.models.shape import ModelShape


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, longest: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        **more,
    }


KNOWN: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _llama(30, 576, 9, 3, 1536, 49152, 8192, tie_word_embeddings=True),
    "SmolLM2-1.7B": _llama(24, 2048, 32, 32, 8192, 49152, 8192, tie_word_embeddings=True),
    "Llama-3.2-1B": _llama(16, 2048, 32, 8, 8192, 128256, 131072, head_dim=64, tie_word_embeddings=True),
    "Llama-3.2-3B": _llama(28, 3072, 24, 8, 8192, 128256, 131072, head_dim=128, tie_word_embeddings=True),
    "Llama-3.1-8B": _llama(32, 4096, 32, 8, 14336, 128256, 131072),
    "Llama-3.1-70B": _llama(80, 8192, 64, 8, 28672, 128256, 131072),
    "Mistral-7B": _llama(32, 4096, 32, 8, 14336, 32768, 32768),
    "Qwen2.5-7B": _llama(28, 3584, 28, 4, 18944, 152064, 32768, architectures=["Qwen2ForCausalLM"]),
    "Qwen3-8B": _llama(36, 4096, 32, 8, 12288, 151936, 40960, architectures=["Qwen3ForCausalLM"], head_dim=128),
    "Qwen3-32B": _llama(64, 5120, 64, 8, 25600, 151936, 40960, architectures=["Qwen3ForCausalLM"], head_dim=128),
}
"""The config.json of well-known models, as published."""


def shape(model: str) -> ModelShape:
    """The shape of a model: a directory, a well-known name, a GGUF file or a hub name. Raises ModelNotFound with the known names.

    A directory with a config.json takes precedence over a well-known model of the same name.
    """
    path = Path(model).expanduser()
    if not ((path / "config.json").exists() or model.startswith((".", "/", "~"))):
        short = model.rpartition("/")[2].lower().removesuffix("-instruct")
        raw = next((raw for name, raw in KNOWN.items() if name.lower() == short), None)
        if raw is not None:
            return ModelConfig.parse(raw)
    from chairlift.checkpoint.locate import locate

    try:
        return load_shape(locate(model, None))
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}; known without files: {', '.join(KNOWN)}") from None
