"""Parses which layers of a config.json have a sliding window, and which have rotary positions."""

from __future__ import annotations

from typing import Any

from chairlift.architectures import Architecture, Windows
from chairlift.errors import UnsupportedModel
from chairlift.models.fields import parse_names, parse_size


def parse_windows(raw: dict[str, Any], family: Architecture, layers: int) -> tuple[int | None, ...]:
    """Returns each layer's sliding window: the number of tokens that a token sees, itself included; None means all."""
    window, rule, types = raw.get("sliding_window", family.sliding_window), family.windows, parse_names(raw, "layer_types")
    if rule is Windows.NONE or window is None or (rule is Windows.SWITCHED and not raw.get("use_sliding_window", False)):
        return (None,) * layers
    window = parse_size({"sliding_window": window}, "sliding_window")
    if rule is Windows.ALL or (rule is Windows.ALL_UNLESS_LISTED and types is None):
        return (window,) * layers
    if types is None and family.window_interval is not None:
        interval = parse_size(raw, "sliding_window_pattern", raw.get("global_attn_every_n_layers", family.window_interval))
        return tuple(window if (layer + 1) % interval else None for layer in range(layers))
    if types is None and family.no_rope_interval is not None:
        return tuple(None if uses else window for uses in parse_rope_layers(raw, family, layers))
    if types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(layers))
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != layers:
        raise UnsupportedModel(f"layer_types must name full_attention or sliding_attention for each of {layers} layers, got {types!r:.200}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def parse_rope_layers(raw: dict[str, Any], family: Architecture, layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether it uses rotary positions."""
    if family.positions is not None:
        return (False,) * layers
    if family.position_type is not None:
        return (raw.get("position_embedding_type", family.position_type) == "rope",) * layers
    if family.window_rotary and raw.get("sliding_window", family.sliding_window) is not None:
        return tuple(window is not None for window in parse_windows(raw, family, layers))
    interval = family.no_rope_interval
    if interval is None:
        return (True,) * layers
    interval = parse_size(raw, "no_rope_layer_interval", interval)
    listed = raw.get("no_rope_layers")
    if listed is None:
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(listed, list) or len(listed) < layers or set(listed) - {0, 1}:
        raise UnsupportedModel(f"config.json: no_rope_layers must have 0 or 1 for each of {layers} layers, got {listed!r:.200}")
    return tuple(bool(entry) for entry in listed[:layers])
