"""Parses the part of a config.json that describes attention to latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.models.fields import NoNativeModel, parse_number, parse_size
from chairlift.models.rope_config import mscale, rope_table

LATENT_EPS = 1e-6
"""What the norms of latents add to squares. transformers does not read it from config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention to latents (MLA: DeepSeek-V2, 2024), of which the KV cache has one vector a token.

    Keys and values of `heads` are made of a latent of the size `rank`, and queries of one of `query_rank`, or of the hidden state if it is
    None. A head of queries and keys has `plain` numbers and then `rotated` ones, which all heads of a key share; neighbours are rotated
    together if they are `adjacent`. A head of values has `value` numbers. Scores are products times `scale`.
    """

    heads: int
    query_rank: int | None
    rank: int
    plain: int
    rotated: int
    value: int
    adjacent: bool
    scale: float

    @property
    def cached(self) -> int:
        """The numbers of a token in a layer's cache."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        """The numbers of a head of a query."""
        return self.plain + self.rotated

    @property
    def queries(self) -> int:
        """The numbers of all heads of a query."""
        return self.heads * self.query

    @property
    def projected(self) -> int:
        """The outputs of the projections of the hidden state."""
        return (self.query_rank or self.queries) + self.cached

    @property
    def expanding(self) -> int:
        """The numbers of the matrices that make keys and values of a latent. torch keeps them in 16 bits."""
        return self.heads * (self.plain + self.value) * self.rank

    def matrices(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's other matrices: the projections, the output, and that of queries."""
        matrices = (self.projected, hidden), (hidden, self.heads * self.value)
        return (*matrices, (self.queries, self.query_rank)) if self.query_rank else matrices


def parse_latent(raw: dict[str, Any], heads: int) -> Latent:
    """Parses the sizes of a model with `heads` attention heads.

    Raises UnsupportedModel for invalid values, and NoNativeModel for biases.
    """
    if raw.get("attention_bias"):
        raise NoNativeModel("biases of attention to latents have no code of ours")
    plain, rotated = parse_size(raw, "qk_nope_head_dim"), parse_size(raw, "qk_rope_head_dim")
    if rotated % 2:
        raise UnsupportedModel(f"config.json: qk_rope_head_dim must be even for rotary positions, got {rotated}")
    table = rope_table(raw)
    factor = 1.0
    if table.get("rope_type", table.get("type", "default")) != "default" and table.get("mscale_all_dim"):
        factor = mscale(parse_number(table, "factor"), parse_number(table, "mscale_all_dim"))
    return Latent(
        heads=heads,
        query_rank=None if raw.get("q_lora_rank") is None else parse_size(raw, "q_lora_rank"),
        rank=parse_size(raw, "kv_lora_rank"),
        plain=plain,
        rotated=rotated,
        value=parse_size(raw, "v_head_dim"),
        adjacent=bool(raw.get("rope_interleave", True)),
        scale=(plain + rotated) ** -0.5 * factor**2,
    )
