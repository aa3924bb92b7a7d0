"""Converts the metadata of a GGUF file to Hugging Face's config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from chairlift.architectures import GGUF, Architecture, GGUFFormat, Key, Windows
from chairlift.checkpoint.gguf_file import GGUFFile
from chairlift.errors import UnsupportedModel


def architecture_of(file: GGUFFile) -> tuple[Architecture, GGUFFormat]:
    """Returns the architecture of a file. Raises UnsupportedModel for one that there is no code for."""
    kind = file.get("general.architecture", str)
    if kind not in GGUF:
        raise UnsupportedModel(f"{file.path} holds a model of architecture {kind!r}; those that can be read: {', '.join(GGUF)}")
    architecture = GGUF[kind]
    assert architecture.gguf is not None
    return architecture, architecture.gguf


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the file's configuration in the format of Hugging Face's config.json."""
    architecture, layout = architecture_of(file)
    kind = file.get("general.architecture", str)
    assert kind is not None
    if file.get(f"{kind}.expert_count", int):
        raise UnsupportedModel(f"{file.path} is a mixture of experts, which cannot be read from GGUF")
    hidden, heads = file.size(f"{kind}.embedding_length"), file.size(f"{kind}.attention.head_count")
    head_dim = file.size(f"{kind}.attention.key_length", file.size(f"{kind}.rope.dimension_count", hidden // heads))
    if {file.size(f"{kind}.{key}", head_dim) for key in ("rope.dimension_count", "attention.value_length")} != {head_dim} or head_dim % 2:
        raise UnsupportedModel(f"{file.path}: rotary or value dimensions that differ from the head's {head_dim} cannot be read")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModel(f"{file.path} holds no model: tensor token_embd.weight is missing")
    config = {
        "architectures": [architecture.name],
        "model_type": layout.model_type,
        "hidden_size": hidden,
        "intermediate_size": file.size(f"{kind}.feed_forward_length"),
        "num_hidden_layers": file.size(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.size(f"{kind}.context_length"),
        "rms_norm_eps": file.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number(f"{kind}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, kind, head_dim),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "dtype": "float32",
        **layout.constants,
    }
    for name, key in layout.keys.items():
        if not key.optional or file.value(f"{kind}.{key.name}") is not None:
            config[name] = _entry(file, f"{kind}.{key.name}", key)
    if architecture.windows is Windows.LISTED:
        config["layer_types"] = _layer_types(file, f"{kind}.attention.sliding_window_pattern", architecture, config["num_hidden_layers"])
    if architecture.query_scalar is not None:
        largest = config["num_hidden_layers"] == layout.largest_layers
        config["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
    if kind == "granite" and file.get("granite.rope.scaling.finetuned", bool) is False:
        raise UnsupportedModel(f"{file.path} has no rotary positions, which Granite's code here needs")
    for name, role in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = file.get(f"tokenizer.ggml.{role}_token_id", int)
        if token is not None and token < embedding.shape[0]:
            config[f"{name}_token_id"] = token
    return config


def _entry(file: GGUFFile, name: str, key: Key) -> float:
    if key.kind is float:
        return file.number(name, key.default)
    return file.size(name, None if key.default is None else int(key.default))


def _layer_types(file: GGUFFile, key: str, architecture: Architecture, layers: int) -> list[str]:
    """Returns the attention type of each layer. Every n-th layer has full attention, or a list names the layers with a window."""
    pattern = file.value(key)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise UnsupportedModel(f"{file.path}: {key} has {len(pattern)} entries for {layers} layers")
        windows = [bool(entry) for entry in pattern]
    else:
        every = file.size(key, architecture.window_interval)
        windows = [(layer + 1) % every != 0 for layer in range(layers)]
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _rope_scaling(file: GGUFFile, kind: str, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, file.number(f"{kind}.rope.freq_base", 10000.0), head_dim)
    scaling = file.get(f"{kind}.rope.scaling.type", str) or "linear"
    named = [key for key in (f"{kind}.rope.scaling.factor", f"{kind}.rope.scale_linear") if file.get(key, float)]
    factor = file.number(named[0]) if named else 1.0
    if scaling == "none" or factor == 1.0:
        return None
    if scaling == "linear":
        return {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        context = file.size(f"{kind}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    raise UnsupportedModel(f"{file.path}: rope scaling of type {scaling!r} cannot be read; known are linear and yarn")


def _llama3_scaling(file: GGUFFile, base: float, head_dim: int) -> dict[str, Any]:
    """Returns Llama 3's scaling. The file holds only its result: the divisor of each frequency."""
    divisors = file.data(file.tensors["rope_freqs.weight"]).view(np.float32)
    factor, low, high, context = float(divisors.max()), 1.0, 4.0, 8192
    turns = context * base ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedModel(f"{file.path}: its rope frequencies are not those of Llama 3, and cannot be read")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
