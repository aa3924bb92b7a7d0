"""Describes a model from its files, without reading its weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from chairlift.checkpoint.generation_config import NAME as GENERATION
from chairlift.checkpoint.generation_config import unused_settings
from chairlift.checkpoint.gguf import GGUFTensors
from chairlift.checkpoint.info import CheckpointInfo
from chairlift.checkpoint.safetensors_file import tensor_files
from chairlift.checkpoint.tokenizer_files import tokenizer_config, tokenizer_file
from chairlift.checkpoint.tokenizer_settings import CONFIG, unknown_settings
from chairlift.checkpoint.weight_files import gguf_link, weight_bytes
from chairlift.errors import ModelNotFound, UnsupportedModel
from chairlift.models.config import ModelConfig, load_shape
from chairlift.models.encoder import EncoderConfig
from chairlift.models.shape import ModelShape

KV_BYTES = 4
"""Bytes of a number of the KV cache, in float32."""


def describe(directory: Path) -> dict[str, str]:
    """Returns the facts that help to choose a model: what it is, what it takes, and what computes it.

    Raises ModelNotFound or UnsupportedModel if Chairlift cannot run it.
    """
    encoder = EncoderConfig.find(directory)
    shape = encoder or load_shape(directory)
    tensors = _tensors(directory)
    parts = f"{shape.num_layers} layers, {shape.num_heads} heads, hidden size {shape.hidden_size:,}, vocabulary {shape.vocab_size:,}"
    shares = {name: 100 * size / max(1, tensors.total()) for name, size in tensors.most_common()}
    types = ", ".join(f"{name} {share:.0f} %" for name, share in shares.items() if share >= 0.5)
    facts = {
        "path": str(directory),
        "architecture": f"{shape.architecture}: {parts}",
        "parameters": f"{shape.num_weights / 1e6:,.0f} million",
        "weights": f"{weight_bytes(directory) / 1e6:,.0f} MB" + (f" ({types})" if types else ""),
        "context": f"{shape.max_position_embeddings:,} tokens",
    }
    if encoder is None:
        facts["KV cache"] = f"{_kv_bytes(shape) / 1e3:,.0f} kB a token in float32"
    is_decoder = encoder is None and not (isinstance(shape, ModelConfig) and shape.headless)
    facts["answers"] = "text, and embeddings by pooling" if is_decoder else "embeddings"
    facts["computed by"] = _code(shape)
    if unused := [*shape.unread, *_unused(directory)]:
        facts["not used"] = ", ".join(unused)
    return facts


def _unused(directory: Path) -> list[str]:
    """The entries of other files than config.json that are not used, each with the name of its file."""
    found = {GENERATION: unused_settings(directory), CONFIG: unknown_settings(tokenizer_config(tokenizer_file(directory)))}
    return [f"{name} of {file}" for file, names in found.items() for name in names]


def checkpoint_info(directory: Path, shape: ModelShape) -> CheckpointInfo:
    """Describes a checkpoint for clients."""
    try:
        kinds = _tensors(directory).most_common(1)
    except (ModelNotFound, UnsupportedModel):  # random weights have no files, and transformers may read more types than Chairlift
        kinds = []
    return CheckpointInfo(
        architecture=shape.architecture,
        num_weights=shape.num_weights,
        weight_format="safetensors" if gguf_link(directory) is None else "gguf",
        weight_type=shape.quantization or (kinds[0][0] if kinds else ""),
        weight_bytes=weight_bytes(directory),
    )


def _tensors(directory: Path) -> Counter[str]:
    """The bytes of tensors by type."""
    found: Counter[str] = Counter()
    if (source := gguf_link(directory)) is not None:
        tensors = GGUFTensors(source)
        for name, entry in tensors.entries.items():
            found[tensors.type_name(name)] += entry.size
    else:
        for name, file in tensor_files(directory).items():
            stored = file.tensors[name]
            found[stored.dtype] += stored.size
    return found


def _kv_bytes(shape: ModelShape) -> int:
    return sum(KV_BYTES * spec.kv_heads * (spec.head_dim + spec.value_dim) for spec in shape.kv_specs or ())


def _code(shape: ModelShape) -> str:
    if isinstance(shape, EncoderConfig):
        return "the CPU kernels"
    if isinstance(shape, ModelConfig):
        return "the CPU kernels" + ("" if shape.only_in_rust else "; torch with Triton kernels on a GPU")
    return f"transformers' code in torch ({shape.not_ours})"
