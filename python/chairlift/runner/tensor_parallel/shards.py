"""Splits a model's weights among the processes of a tensor-parallel group."""

from __future__ import annotations

import torch

from chairlift.layers.linear import Quantised, Weight
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.models.forward_batch import WeightSource

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc", "fc1", "fc_in")
"""Column-parallel projections: each process computes some outputs (rows of the weight)."""
_COLUMNS = ("o_proj", "down_proj", "dense", "c_proj", "fc2", "fc_out", "out_proj")
"""Row-parallel projections: each process has some inputs (columns of the weight), and the results are summed."""


class Shards:
    """A `WeightSource` that returns one process's part of each tensor."""

    def __init__(self, whole: WeightSource, group: TensorParallelGroup) -> None:
        self._whole, self._group = whole, group

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """This process's part of a tensor other than a layer's weight. `shape` is the part's shape, but the whole one's for the head."""
        layer = name.rpartition(".")[0]
        if layer == "lm_head":
            return self._group.part(self._whole.take(name, *shape)).clone()
        if layer.endswith(_ROWS):
            whole = self._whole.take(name, shape[0] * self._group.size)
            return _copied(whole, 0, self._group.rank * shape[0], shape[0])
        whole = self._whole.take(name, *shape)
        # The bias of a summed projection is added by one process only.
        return whole if self._group.rank == 0 or not layer.endswith(_COLUMNS) else torch.zeros_like(whole)

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        """A whole tensor in fp32."""
        return self._whole.floats(name, *shape)

    def packed(self, name: str, *shape: int) -> torch.Tensor:
        """A whole tensor of bytes."""
        return self._whole.packed(name, *shape)

    def has(self, name: str, *shape: int) -> bool:
        """Whether there is a tensor of that name, and as a whole of that shape if one is given."""
        return self._whole.has(name, *shape)

    def matrix(self, layer: str, outs: int, ins: int) -> Weight:
        """This process's part of the weight of a layer."""
        rank, size = self._group.rank, self._group.size
        if not layer.endswith(_COLUMNS):
            return _narrowed(self._whole.matrix(layer, outs * size, ins), 0, rank * outs, outs)
        return _narrowed(self._whole.matrix(layer, outs, ins * size), 1, rank * ins, ins)

    def scales(self, name: str, heads: int) -> torch.Tensor | None:
        """The scales of this process's KV heads."""
        whole = self._whole.scales(name, heads * self._group.size)
        return None if whole is None else whole[self._group.rank * heads :][:heads].clone()


def _narrowed(whole: Weight, axis: int, start: int, count: int) -> Weight:
    """A copy of some rows (axis 0) or columns of a weight, as they are stored. No group of columns is split."""
    if isinstance(whole, torch.Tensor):
        return _copied(whole, axis, start, count)
    numbers, scale, zero, group, order = whole
    if axis == 1 and order is not None:
        order = _copied(order, 0, start, count)
    # Columns of the matrix for each number and for each scale.
    each, columns = (1, 1) if axis == 0 else (1 if zero is None else 2, group)
    if axis == 1 and not group:
        return Quantised(_copied(numbers, 1, start // each, count // each), scale, zero, group)
    scale = _copied(scale, axis, start // columns, count // columns)
    zero = None if zero is None else _copied(zero, axis, start // columns, count // columns)
    return Quantised(_copied(numbers, axis, start // each, count // each), scale, zero, group, order)


def _copied(whole: torch.Tensor, axis: int, start: int, count: int) -> torch.Tensor:
    return whole.narrow(axis, start, count).clone(memory_format=torch.contiguous_format)
