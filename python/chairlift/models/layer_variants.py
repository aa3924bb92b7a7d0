"""Parses what differs from layer to layer in Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.models.fields import NoNativeModel, parse_count, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVariants:
    """What differs from layer to layer in Gemma 4, where values are normalised and each layer scales the residual stream.

    Layers with a window have `local_heads`: a number of KV heads, and their size. The last `shared` layers use the keys and values of the
    last of the others with the same kind of attention; if they are `wide`, their MLP has twice the inner size. With `keys_as_values` layers
    with full attention use their keys, before norm and rotation, as values. `input_size` is the size of a token's embedding for each layer;
    0 if there is none.
    """

    local_heads: tuple[int, int]
    shared: int
    wide: bool
    keys_as_values: bool
    input_size: int


def parse_variants(
    raw: dict[str, Any], windows: tuple[int | None, ...], local_heads: tuple[int, int], head_dim: int
) -> tuple[LayerVariants, tuple[int, int]]:
    """Returns the variants, and the number and size of the KV heads of layers with full attention.

    `local_heads` are those of layers with a window, and `head_dim` is the default size. Raises UnsupportedModel for invalid values and
    NoNativeModel for embeddings of layers with another vocabulary.
    """
    layers, vocabulary = len(windows), raw.get("vocab_size")
    # transformers 5.24 writes the differences of each layer, and earlier versions those of all layers with full attention.
    own = raw.get("per_layer_config") or {}
    full = next((str(layer) for layer, window in enumerate(windows) if window is None), "")
    found = (own.get(full) or {}) if isinstance(own, dict) else {}
    keys_as_values = bool(raw.get("attention_k_eq_v", False))
    usual = raw.get("num_global_key_value_heads")  # which counts where values are keys
    heads = parse_size(found, "num_key_value_heads", (usual if keys_as_values else None) or local_heads[0])
    size = parse_size(found, "head_dim", parse_size(raw, "global_head_dim", head_dim))
    shared, input_size = (parse_count(raw, name) for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"))
    first = max(layers - shared, 0)
    if missing := {window is None for window in windows[first:]} - {window is None for window in windows[:first]}:
        kind = "full attention" if True in missing else "a window"
        raise UnsupportedModel(f"config.json: num_kv_shared_layers is {shared}: no earlier layer has {kind}, whose keys could be shared")
    if input_size and raw.get("vocab_size_per_layer_input", vocabulary) != vocabulary:
        raise NoNativeModel("embeddings of layers for another vocabulary have no code of ours")
    wide = bool(raw.get("use_double_wide_mlp", False))
    variants = LayerVariants(local_heads=local_heads, shared=shared, wide=wide, keys_as_values=keys_as_values, input_size=input_size)
    return variants, (heads, size)
