"""What everybody but its own code needs to know of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple


class KvSpec(NamedTuple):
    """What one layer keeps of each token: keys [kv_heads, head_dim] and values [kv_heads, value_dim].

    `window` is how many tokens back, itself included, a token sees in this layer; None is all of them.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(ABC):
    """The numbers of any model that memory, precision and the engine go by.

    `intermediate_size` is the widest that a layer gets for one token. `dtype` is the checkpoint's own, as a word (float32, bfloat16,
    float16), or None when it does not say; `quantization` is the method of a quantised one.
    `not_ours` says why there is no code of ours for it, and is empty where there is.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    dtype: str | None
    quantization: str | None = None
    not_ours: str = ""

    @property
    @abstractmethod
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """What each layer keeps in the KV cache."""

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """How many numbers all weights have."""
