"""The properties of a model that memory planning, precision and the engine need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple


class KvSpec(NamedTuple):
    """One layer's cache per token: keys [kv_heads, head_dim] and values [kv_heads, value_dim].

    `value_dim` is 0 if values are parts of keys (attention to latents).
    `window` is the number of tokens that a token sees in this layer, itself included; None means all.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(ABC):
    """Properties of any model that memory planning, precision and the engine need.

    `intermediate_size` is the inner size of an MLP. `dtype` is the checkpoint's dtype as a word (float32, bfloat16,
    float16), or None if it does not say. `quantization` is the method of a quantised checkpoint. `not_ours` is the reason why there is no
    native code for the model; it is empty if there is. `score` is what becomes of the number that a classifier gives to a pair of texts,
    sigmoid or identity; None for other models. `unread` are the entries of config.json that nothing here knows.
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
    score: str | None = None
    unread: tuple[str, ...] = field(default=(), compare=False)

    @property
    @abstractmethod
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """The shape of each layer's KV cache."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of a sequence. 0 if no layer is recurrent."""
        return 0

    @property
    def expert_counts(self) -> tuple[int, int]:
        """The number of experts of a layer, and of those that a token uses. Zeros for a model without experts."""
        return 0, 0

    @property
    def expert_weights(self) -> int:
        """The number of parameters of all experts that tokens choose."""
        return 0

    @property
    def longest_context(self) -> int:
        """The largest context that can be asked for. The default is `max_position_embeddings`."""
        return self.max_position_embeddings

    @property
    def depends_on_length(self) -> bool:
        """Whether tokens are computed differently if sequences can be longer."""
        return False

    @property
    def widest(self) -> int:
        """The numbers of a token's widest activation in a layer."""
        return self.intermediate_size

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """The number of parameters."""

    @property
    def embedding_size(self) -> int:
        """The numbers of a text's embedding."""
        return self.hidden_size
