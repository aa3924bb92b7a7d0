"""What a checkpoint's config.json says of its model, checked and in our words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import ModelNotFound, UnsupportedModel


@dataclass(frozen=True, slots=True)
class _Family:
    """What one architecture takes for granted where its config.json is silent."""

    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 32768
    sliding_window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": _Family(max_positions=2048),
    "MistralForCausalLM": _Family(kv_heads=8, max_positions=131072, sliding_window=4096),
    "Qwen2ForCausalLM": _Family(kv_heads=32, qkv_bias=True),
    "Qwen3ForCausalLM": _Family(kv_heads=32, head_dim=128, qk_norm=True),
}
"""The architectures that chairlift runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn into angles; `kind` is default, linear or llama3, and the rest belongs to the latter two."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a model of the Llama family.

    `windows` has one entry per layer: how many tokens back, itself included, a token sees; None is all of them.
    `dtype` is the checkpoint's own, as a word (float32, bfloat16, float16), or None when it does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    dtype: str | None

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Reads config.json of a checkpoint's directory.

        Raises ModelNotFound when there is no readable config.json, UnsupportedModel when chairlift cannot run what it describes.
        """
        path = directory / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelNotFound(f"{directory} holds no readable config.json ({error.strerror}): is it a model's directory?") from None
        except ValueError as error:
            raise UnsupportedModel(f"{path} is not valid JSON: {error}") from None
        if not isinstance(raw, dict):
            raise UnsupportedModel(f"{path} must hold a JSON object")
        return cls.parse(raw)

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> ModelConfig:
        """Turns the content of a config.json into a ModelConfig; raises UnsupportedModel naming what is wrong or unknown."""
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        activation = raw.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModel(f"hidden_act {activation!r} is not supported (supported: silu)")
        if raw.get("quantization_config"):
            raise UnsupportedModel("quantized checkpoints are not supported: use one in float32, bfloat16 or float16, or a GGUF file")
        heads = _size(raw, "num_attention_heads")
        hidden = _size(raw, "hidden_size")
        layers = _size(raw, "num_hidden_layers")
        kv_heads = _size(raw, "num_key_value_heads", family.kv_heads or heads)
        head_dim = _size(raw, "head_dim", family.head_dim or hidden // heads)
        if heads % kv_heads:
            raise UnsupportedModel(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        if head_dim % 2:
            raise UnsupportedModel(f"head_dim must be even for rotary positions, got {head_dim}")
        bias = bool(raw.get("attention_bias", False)) and architecture != "MistralForCausalLM"
        return cls(
            architecture=architecture,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or bias,
            output_bias=bias and not family.qkv_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
            qk_norm=family.qk_norm,
            windows=_windows(raw, architecture, layers),
            max_position_embeddings=_size(raw, "max_position_embeddings", family.max_positions),
            dtype=_dtype(raw),
        )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name)
    named = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r}, and no architectures,"
    raise UnsupportedModel(f"{named} is not supported (supported: {', '.join(FAMILIES)})")


def _size(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer of the config; None and absence mean the default."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Reads both spellings: `rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling` before it."""
    found: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"rope type {kind!r} is not supported (supported: default, linear, llama3)")
    partial = found.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported (supported: 1)")
    try:
        return RopeConfig(
            theta=float(found.get("rope_theta", raw.get("rope_theta") or 10000.0)),
            kind=kind,
            factor=float(found["factor"]) if kind != "default" else 1.0,
            low_freq_factor=float(found["low_freq_factor"]) if kind == "llama3" else 1.0,
            high_freq_factor=float(found["high_freq_factor"]) if kind == "llama3" else 4.0,
            original_max_position_embeddings=int(found["original_max_position_embeddings"]) if kind == "llama3" else 8192,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"config.json: rope type {kind!r} lacks a usable {error}") from None


def _windows(raw: dict[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """Which layers see a sliding window: all of Mistral's, and of Qwen the ones that layer_types or max_window_layers name."""
    everywhere = FAMILIES[architecture].sliding_window
    window = raw.get("sliding_window", everywhere)
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * layers
    window = _size({"sliding_window": window}, "sliding_window")
    if everywhere is not None:
        return (window,) * layers
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(layers))
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != layers:
        raise UnsupportedModel(f"layer_types must name full_attention or sliding_attention for each of {layers} layers, got {types!r:.200}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _dtype(raw: dict[str, Any]) -> str | None:
    name = raw.get("dtype", raw.get("torch_dtype"))
    return str(name).removeprefix("torch.") if name is not None else None
