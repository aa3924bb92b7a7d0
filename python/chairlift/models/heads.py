"""Parses the heads of attention of a config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift.architectures import Architecture
from chairlift.errors import UnsupportedModel
from chairlift.models.fields import NoNativeModel, parse_size
from chairlift.models.latent import Latent, parse_latent
from chairlift.models.layer_variants import LayerVariants, parse_variants
from chairlift.models.windows import parse_windows


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model's attention. `kv` are the number and the size of KV heads, and `local` those of layers with a window."""

    queries: int
    kv: tuple[int, int]
    local: tuple[int, int]
    windows: tuple[int | None, ...]
    latent: Latent | None
    variants: LayerVariants | None

    @property
    def rotated(self) -> tuple[int, int]:
        """The numbers of a head that can be rotated, in layers with full attention and in those with a window."""
        return (self.latent.rotated,) * 2 if self.latent else (self.kv[1], self.local[1])

    @property
    def scale(self) -> float:
        """What usually multiplies the products of queries and keys."""
        return self.latent.scale if self.latent else self.kv[1] ** -0.5


def parse_heads(raw: dict[str, Any], family: Architecture, hidden: int, layers: int) -> Heads:
    """Returns the heads of a model with this hidden size and number of layers.

    Raises UnsupportedModel for invalid values, and NoNativeModel for what there is no code for.
    """
    queries = parse_size(raw, "num_attention_heads", family.heads)
    latent = parse_latent(raw, queries) if family.latent else None
    count = 1 if latent else parse_size(raw, "num_key_value_heads", family.kv_heads or queries)
    local = count, latent.cached if latent else parse_size(raw, "head_dim", family.head_dim or hidden // queries)
    windows, variants, kv = parse_windows(raw, family, layers), None, local
    if family.global_head_dim is not None:
        variants, kv = parse_variants(raw, windows, local, family.global_head_dim)
    for count, size in {local, kv}:
        if queries % count:
            raise UnsupportedModel(f"num_attention_heads ({queries}) must be a multiple of num_key_value_heads ({count})")
        if size % 2 and family.positions is not None:
            raise NoNativeModel(f"heads of {size} numbers have no code of ours")
        if size % 2:
            raise UnsupportedModel(f"head_dim must be even for rotary positions, got {size}")
    return Heads(queries, kv, local, windows, latent, variants)
