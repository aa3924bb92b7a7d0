"""What a pass of a model in torch reads: its tensors, and the tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from chairlift.layers.attention import AttentionPlan
from chairlift.layers.linear import Weight
from chairlift.layers.lora import AdapterRows
from chairlift.layers.recurrent import StateStep

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""One layer's keys [blocks, kv_heads, block_size, head_dim] and values [blocks, kv_heads, block_size, value_dim]."""


class WeightSource(Protocol):
    """A source of a model's tensors, by their Hugging Face names."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of that name in the model's dtype and on its device. Raises if it has another shape."""
        ...

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of that name in fp32 on the model's device. Raises if it has another shape."""
        ...

    def packed(self, name: str, *shape: int) -> torch.Tensor:
        """The bytes of that name on the model's device. Raises if they have another shape."""
        ...

    def has(self, name: str, *shape: int) -> bool:
        """Whether there is a tensor of that name, and of that shape if one is given."""
        ...

    def matrix(self, layer: str, outs: int, ins: int) -> Weight:
        """The weight [outs, ins] of a linear layer, quantised if the checkpoint's is. Raises if it has another shape."""
        ...

    def scales(self, name: str, heads: int) -> torch.Tensor | None:
        """The scales of that name on the model's device, fp32 [heads]; None if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one forward pass over T tokens; input_ids and positions are integer tensors [T]."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionPlan
    adapters: AdapterRows | None = None
    """The rows that have LoRA adapters, which only a `Llama` can have."""
    states: StateStep | None = None
    """The recurrent states, which only a `Llama` with recurrent layers has."""
