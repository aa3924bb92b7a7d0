"""LoRA adapters: low-rank updates of linear layers' outputs, for the rows of a step that have an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from chairlift.layers.linear import Activations, Linear, Rounded


class LowRankUpdate(NamedTuple):
    """The update x A^T B^T of some columns of a linear layer's output: fp32 A [rank, in] and B [columns, rank], which has the scale."""

    columns: slice
    a: torch.Tensor
    b: torch.Tensor


Adapter = Mapping[Linear, Sequence[LowRankUpdate]]
"""An adapter's updates, of the layers that it changes."""


class AdapterRows:
    """The rows of a step that have adapters: each adapter with its rows, int64 [rows] on the model's device, of which no two are equal."""

    def __init__(self, groups: Sequence[tuple[Adapter, torch.Tensor]]) -> None:
        self._groups = groups

    def add(self, linear: Linear, x: Activations, out: torch.Tensor) -> None:
        """Adds the adapters' updates to `out` [rows, out], the layer's output for x. Products are computed in fp32, adapter by adapter.

        Rows without an adapter are not touched.
        """
        for adapter, rows in self._groups:
            if updates := adapter.get(linear):
                inputs = _inputs(x, rows)
                for columns, a, b in updates:
                    part = out[:, columns]
                    summed = part.index_select(0, rows).float().addmm_(inputs @ a.mT, b.mT)
                    part.index_copy_(0, rows, summed.to(out.dtype))


def adapted(linear: Linear, x: Activations, adapters: AdapterRows | None) -> torch.Tensor:
    """The output of a linear layer for x, with the updates of the step's adapters, if it has any."""
    out = linear(x)
    if adapters is not None:
        adapters.add(linear, x, out)
    return out


def _inputs(x: Activations, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a layer's input in fp32."""
    if isinstance(x, Rounded):
        return x.numbers.index_select(0, rows).float() * x.scale.index_select(0, rows)
    return x.index_select(0, rows).float()
