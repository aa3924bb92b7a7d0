"""A process's part of a model that several compute together."""

from __future__ import annotations

from dataclasses import replace

import torch

from chairlift.errors import InvalidSetting
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.models.config import ModelConfig
from chairlift.models.llama import WeightSource
from chairlift.models.shape import ModelShape

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Projections of which each process computes some outputs."""
_COLUMNS = ("o_proj", "down_proj")
"""Those of which each has some inputs: their results are summed."""


def part_of(model: ModelShape, size: int) -> ModelConfig:
    """What each of `size` processes has of a model; raises InvalidSetting where it cannot be cut so."""
    flag = f"--tensor-parallel-size {size}"
    if not isinstance(model, ModelConfig):
        raise InvalidSetting(f"{flag}: only models with code of ours can be cut, and for {model.architecture} there is none")
    cut = {"num_heads": "attention heads", "num_kv_heads": "KV heads", "intermediate_size": "inner columns"}
    for name, words in cut.items():
        if getattr(model, name) % size:
            raise InvalidSetting(f"{flag}: the model has {getattr(model, name)} {words}, which cannot be cut into {size} equal parts")
    return replace(model, **{name: getattr(model, name) // size for name in cut})


class Shards:
    """A `WeightSource` that gives of each tensor the part of one process, whose model is as `part_of` says."""

    def __init__(self, whole: WeightSource, peers: TensorParallelGroup) -> None:
        self._whole, self._peers = whole, peers

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The part of the tensor of that name; `shape` is that of the part, but for a head's the whole's."""
        layer, _, kind = name.rpartition(".")
        if layer == "lm_head":
            return self._peers.part(self._whole.take(name, *shape)).clone()
        if layer.endswith(_ROWS):
            return self._part(name, 0, shape)
        if layer.endswith(_COLUMNS) and kind == "weight":
            return self._part(name, 1, shape)
        whole = self._whole.take(name, *shape)
        # What is added to a sum is added once.
        return whole if self._peers.rank == 0 or not layer.endswith(_COLUMNS) else torch.zeros_like(whole)

    def scales(self, name: str, heads: int) -> torch.Tensor | None:
        """Those of the part's heads."""
        whole = self._whole.scales(name, heads * self._peers.size)
        return None if whole is None else whole[self._peers.rank * heads :][:heads].clone()

    def _part(self, name: str, axis: int, shape: tuple[int, ...]) -> torch.Tensor:
        size = shape[axis]
        whole = self._whole.take(name, *shape[:axis], size * self._peers.size, *shape[axis + 1 :])
        return whole.narrow(axis, self._peers.rank * size, size).clone(memory_format=torch.contiguous_format)
