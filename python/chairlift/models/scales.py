"""Parses the factors and the caps of a config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift.architectures import Architecture
from chairlift.errors import UnsupportedModel
from chairlift.models.fields import is_positive


@dataclass(frozen=True, slots=True)
class Scales:
    """What multiplies a model's numbers, and what caps them: a cap c maps x to c * tanh(x / c).

    Embeddings are multiplied by `embedding`, the products of attention by `attention`, and logits by `logits`. The output of attention and
    of the MLP is multiplied by `residual` before it is added to the residual stream. `scores_cap` is that of attention scores.
    """

    embedding: float
    attention: float
    residual: float = 1.0
    logits: float = 1.0
    scores_cap: float | None = None
    logits_cap: float | None = None


def parse_scales(raw: dict[str, Any], family: Architecture, hidden: int, attention: float) -> Scales:
    """Returns those of a model with this hidden size. `attention` is the usual factor. Raises UnsupportedModel for invalid values."""
    scores_cap, logits_cap = _softcaps(raw, family)
    if family.multipliers:  # Granite's, which are 1 where config.json is silent
        names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        embedding, attention, residual, logits = (_number(raw, name, 1.0) or 1.0 for name in names)
        return Scales(embedding, attention, residual, 1.0 / logits, scores_cap, logits_cap)
    scalar = _number(raw, "query_pre_attn_scalar", family.query_scalar) if family.query_scalar else None
    scaled = family.scaled_embeddings if isinstance(family.scaled_embeddings, bool) else raw.get(*family.scaled_embeddings)
    embedding, attention = hidden**0.5 if scaled else 1.0, scalar**-0.5 if scalar else attention
    factor = _number(raw, "logit_scale", family.logit_scale) if family.logit_scale else None
    return Scales(embedding, attention, logits=factor or 1.0, scores_cap=scores_cap, logits_cap=logits_cap)


def _softcaps(raw: dict[str, Any], family: Architecture) -> tuple[float | None, float | None]:
    """Returns the caps of attention scores and of logits. Later models than Gemma 2 may name one of scores, and have none."""
    if family.softcaps is None:
        return None, None
    scores, logits = family.softcaps
    cap = _number(raw, "attn_logit_softcapping", scores)
    return cap if scores else None, _number(raw, "final_logit_softcapping", logits)


def _number(raw: dict[str, Any], name: str, default: float | None) -> float | None:
    """Returns a positive number of the config, or None for null. Absence means the default."""
    value = raw.get(name, default)
    if value is None:
        return None
    if not is_positive(value):
        raise UnsupportedModel(f"config.json: {name} must be a positive number or null, got {value!r:.100}")
    return float(value)
