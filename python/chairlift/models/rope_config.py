"""Parses the rotary embeddings of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from chairlift.architectures import Architecture
from chairlift.errors import UnsupportedModel
from chairlift.models.fields import NoNativeModel, is_positive, parse_number, parse_size, parse_table
from chairlift.models.rotary import Dynamic, Linear, Llama3, LongRope, Proportional, RopeConfig, Scaling, Yarn

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
"""The values of `rope_type` that there is code for."""
_ALIASES = {"su": "longrope", "mrope": "default"}
"""Earlier names. Positions of text are the same on all axes of multimodal positions."""

_KNOWN = {
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings", "max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "short_factor", "long_factor"),
    *("low_freq_factor", "high_freq_factor", "llama_4_scaling_beta", "mrope_section", "mrope_interleaved", "finetuned"),
}
"""The entries of rotary parameters that are read, or that matter for images alone."""


def unknown_rope(raw: Mapping[str, Any], family: Architecture) -> dict[str, Any]:
    """Returns the entries of rotary parameters that nothing here knows, by names such as rope_scaling.alpha."""
    found = [(name, parse_table(raw, name)) for name in ("rope_parameters", "rope_scaling")]
    found += [(name, kind) for name, table in found for kind in table.values() if isinstance(kind, dict)]
    known = _KNOWN | ({"alpha"} if family.alpha else set())
    return {f"{name}.{key}": value for name, table in found for key, value in table.items() if key not in known and type(value) is not dict}


def parse_ropes(raw: dict[str, Any], family: Architecture, head_dims: tuple[int, int]) -> tuple[RopeConfig, RopeConfig]:
    """Returns the rotary embeddings of layers with full attention and of layers with a sliding window, whose head sizes are `head_dims`.

    Raises UnsupportedModel for invalid values, and NoNativeModel for a kind that there is no code for.
    """
    if family.local_theta is None:
        if any(isinstance(table, dict) for table in parse_table(raw, "rope_parameters").values()):
            raise NoNativeModel("rotary parameters by kind of layer have no code of ours in this architecture")
        rope = _parse(raw, family, family.theta, head_dims[0])
        return rope, rope
    # transformers 5 has a table for each kind of layer. Earlier versions have a separate number for layers with a window.
    tables = parse_table(raw, "rope_parameters")
    everywhere = raw | {"rope_parameters": tables.get("full_attention")}
    usual = raw.get("rope_theta") if family.local_theta == family.theta else None  # OLMo 3 has one number for all layers
    local = {"rope_theta": raw.get("rope_local_base_freq") or usual, "rope_parameters": tables.get("sliding_attention")}
    local["max_position_embeddings"] = raw.get("max_position_embeddings")
    return _parse(everywhere, family, family.theta, head_dims[0]), _parse(local, family, family.local_theta, head_dims[1])


def longest_context(positions: int, rope: RopeConfig) -> int:
    """Returns the positions that a model was made for. The config.json of a model with YaRN may name those before YaRN."""
    return max(positions, round(rope.scaling.factor * rope.scaling.original)) if isinstance(rope.scaling, Yarn) else positions


def parse_temperature(raw: Mapping[str, Any]) -> tuple[float, int] | None:
    """Returns how queries grow with their position: the weight of the logarithm, and the positions with one factor."""
    table = rope_table(raw)
    if table.get("llama_4_scaling_beta") is None:
        return None
    return parse_number(table, "llama_4_scaling_beta"), parse_size(
        table, "original_max_position_embeddings", raw.get("max_position_embeddings")
    )


def rope_table(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary parameters: `rope_parameters` of transformers 5, or the older `rope_scaling`.

    Users add the second to a file that has the first. As in transformers, its scaling then prevails.
    """
    scaling, table = parse_table(raw, "rope_scaling"), parse_table(raw, "rope_parameters")
    kept = {name: entry for name, entry in table.items() if not scaling or name in ("rope_theta", "partial_rotary_factor")}
    found = {**kept, **scaling}
    if raw.get("original_max_position_embeddings") is not None:
        found["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    return found


def _parse(raw: Mapping[str, Any], family: Architecture, theta: float, head_dim: int) -> RopeConfig:
    table = rope_table(raw)
    named = table.get("rope_type", table.get("type")) or "default"
    # Phi-3's first checkpoints say yarn.
    kind = "longrope" if "short_factor" in table else _ALIASES.get(str(named), str(named))
    alpha = family.alpha and kind == "dynamic" and table.get("alpha")
    if alpha:
        kind = "default"
    if kind not in KINDS or "long_mscale" in table:
        raise NoNativeModel(f"rope type {named!r} has no code of ours (there is for {', '.join(KINDS)})")
    if kind == "dynamic":  # as in transformers and vLLM, which do not read the length of training from the table
        table["original_max_position_embeddings"] = raw.get("max_position_embeddings")
    table.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    if kind in ("yarn", "longrope") and table.get("factor") is None:
        table["factor"] = parse_size(raw, "max_position_embeddings") / parse_size(table, "original_max_position_embeddings")
    base = parse_number(table, "rope_theta", raw.get("rope_theta") or theta)
    if alpha:
        base *= parse_number(table, "alpha") ** (head_dim / (head_dim - 2))
    if kind == "yarn" and base <= 1:
        raise UnsupportedModel(f"config.json: rope_theta must be more than 1 with YaRN, got {base}")
    usual = raw["rotary_dim"] / head_dim if is_positive(raw.get("rotary_dim")) else family.rotary or 1.0  # MiniMax-M2's name
    partial = table.get("partial_rotary_factor", raw.get("partial_rotary_factor", usual))
    dim = head_dim if kind == "proportional" else _rotary_dim(partial, family, head_dim)
    if kind == "proportional":
        share = parse_number({"partial_rotary_factor": partial}, "partial_rotary_factor", 1.0)
        if share > 1:
            raise UnsupportedModel(f"config.json: partial_rotary_factor must be at most 1, got {share}")
        return RopeConfig(dim=dim, theta=base, scaling=Proportional(int(share * head_dim // 2), parse_number(table, "factor", 1.0)))
    return RopeConfig(dim=dim, theta=base, scaling=_scaling(kind, table, dim), scale=_scale(kind, table))


def _rotary_dim(partial: Any, family: Architecture, head_dim: int) -> int:
    """Returns how many numbers of each head are rotated."""
    if partial in (None, 1, 1.0):
        return head_dim
    if family.rotary is None:
        raise NoNativeModel(f"partial_rotary_factor {partial} has no code of ours (there is for 1)")
    dim = int(head_dim * partial + 1e-6) if isinstance(partial, float) and 0 < partial < 1 else 0
    if dim == 0 or dim % 2:
        raise UnsupportedModel(f"config.json: partial_rotary_factor {partial!r} does not give an even part of a head's {head_dim} numbers")
    return dim


def _scaling(kind: str, table: Mapping[str, Any], dim: int) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(parse_number(table, "factor"))
    original = parse_size(table, "original_max_position_embeddings")
    if kind == "dynamic":
        return Dynamic(parse_number(table, "factor"), original)
    if kind == "longrope":
        return LongRope(original, _divisors(table, "short_factor", dim), _divisors(table, "long_factor", dim))
    if kind == "llama3":
        low, high = parse_number(table, "low_freq_factor"), parse_number(table, "high_freq_factor")
        if low >= high:
            raise UnsupportedModel(f"config.json: low_freq_factor ({low}) must be less than high_freq_factor ({high})")
        return Llama3(parse_number(table, "factor"), low, high, original)
    truncate = table.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UnsupportedModel(f"config.json: truncate must be true or false, got {truncate!r:.50}")
    fast, slow = parse_number(table, "beta_fast", 32.0), parse_number(table, "beta_slow", 1.0)
    return Yarn(parse_number(table, "factor"), original, fast, slow, truncate)


def _divisors(table: Mapping[str, Any], name: str, dim: int) -> tuple[float, ...]:
    listed = table.get(name)
    sound = isinstance(listed, list) and all(map(is_positive, listed))
    if not isinstance(listed, list) or not sound or len(listed) != dim // 2:
        raise UnsupportedModel(f"config.json: {name} must be {dim // 2} positive numbers, got {listed!r:.200}")
    return tuple(map(float, listed))


def _scale(kind: str, table: Mapping[str, Any]) -> float:
    """Returns the factor of cosines and sines, by the rules of transformers."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if table.get("attention_factor") is not None:
        return parse_number(table, "attention_factor")
    factor = parse_number(table, "factor")
    if kind == "longrope":
        if (original := parse_size(table, "original_max_position_embeddings")) == 1:
            raise UnsupportedModel("config.json: original_max_position_embeddings must be more than 1")
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if table.get("mscale") and table.get("mscale_all_dim"):
        return mscale(factor, parse_number(table, "mscale")) / mscale(factor, parse_number(table, "mscale_all_dim"))
    return mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """Returns what YaRN multiplies queries and keys by, for positions that are stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
