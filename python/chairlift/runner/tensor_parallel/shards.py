"""Splits a model's weights among the processes of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import replace

import torch

from chairlift.errors import InvalidSetting
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.models.config import ModelConfig
from chairlift.models.llama import WeightSource
from chairlift.models.shape import ModelShape

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Column-parallel projections: each process computes some outputs (rows of the weight)."""
_COLUMNS = ("o_proj", "down_proj")
"""Row-parallel projections: each process has some inputs (columns of the weight), and the results are summed."""


def part_of(model: ModelShape, size: int) -> ModelConfig:
    """The shape of one process's part of a model. Raises InvalidSetting if the model cannot be split into `size` parts."""
    flag = f"--tensor-parallel-size {size}"
    if not isinstance(model, ModelConfig):
        raise InvalidSetting(f"{flag}: transformers' code for {model.architecture} cannot be split, only Chairlift's own models can")
    split = {"num_heads": "attention heads", "num_kv_heads": "KV heads", "intermediate_size": "inner columns"}
    for name, words in split.items():
        if getattr(model, name) % size:
            raise InvalidSetting(f"{flag}: the model has {getattr(model, name)} {words}, which cannot be split into {size} equal parts")
    return replace(model, **{name: getattr(model, name) // size for name in split})


class Shards:
    """A `WeightSource` that returns one process's part of each tensor."""

    def __init__(self, whole: WeightSource, group: TensorParallelGroup) -> None:
        self._whole, self._group = whole, group

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """This process's part of a tensor. `shape` is the part's shape, but for the head it is the whole tensor's."""
        layer, _, kind = name.rpartition(".")
        if layer == "lm_head":
            return self._group.part(self._whole.take(name, *shape)).clone()
        if layer.endswith(_ROWS):
            return self._part(name, 0, shape)
        if layer.endswith(_COLUMNS) and kind == "weight":
            return self._part(name, 1, shape)
        whole = self._whole.take(name, *shape)
        # The bias of a summed projection is added by one process only.
        return whole if self._group.rank == 0 or not layer.endswith(_COLUMNS) else torch.zeros_like(whole)

    def scales(self, name: str, heads: int) -> torch.Tensor | None:
        """The scales of this process's KV heads."""
        whole = self._whole.scales(name, heads * self._group.size)
        return None if whole is None else whole[self._group.rank * heads :][:heads].clone()

    def _part(self, name: str, axis: int, shape: tuple[int, ...]) -> torch.Tensor:
        size = shape[axis]
        whole = self._whole.take(name, *shape[:axis], size * self._group.size, *shape[axis + 1 :])
        return whole.narrow(axis, self._group.rank * size, size).clone(memory_format=torch.contiguous_format)
