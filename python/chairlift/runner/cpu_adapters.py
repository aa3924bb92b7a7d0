"""LoRA adapters of the CPU kernels' decoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from chairlift import _core
from chairlift.checkpoint.adapter import AdapterFiles, LowRank
from chairlift.models.config import ModelConfig
from chairlift.runner.adapters import SlotAdapters, check_shapes
from chairlift.runner.weights import Part

Update = tuple[Part, Part, int, float]
"""The update of one tensor as `_core.Adapter` takes it."""


class CpuAdapters(SlotAdapters):
    """Packs and loads adapters, and knows which one each batch slot has (see `AdapterStore`)."""

    def __init__(self, decoder: _core.Decoder, model: ModelConfig, isa: str) -> None:
        super().__init__()
        self._decoder, self._model, self._isa = decoder, model, isa

    def pack(self, files: AdapterFiles) -> _core.Adapter:
        """Packs an adapter. Raises UnsupportedModel if it was made for another base."""
        check_shapes(files, self._model)

        def update(layer: int, module: str) -> Update | None:
            one = files.updates.get((layer, module))
            return None if one is None else _update(one, files)

        blocks = []
        for layer in range(self._model.num_layers):
            blocks.append(([update(layer, module) for module in ("q_proj", "k_proj", "v_proj")], [update(layer, "o_proj")]))
            blocks.append(([update(layer, module) for module in ("gate_proj", "up_proj")], [update(layer, "down_proj")]))
        return _core.Adapter(blocks, isa=self._isa)

    def add(self, packed: Any) -> int:
        """Loads a packed adapter and returns its number."""
        return self._decoder.add_adapter(packed)

    def remove(self, number: int) -> None:
        """Frees the memory of an adapter."""
        self._decoder.remove_adapter(number)

    def by_slot(self, slots: int) -> np.ndarray | None:
        """The number of each slot's adapter, int32 [slots]; None if no slot has one."""
        if not self.slots:
            return None
        numbers = np.zeros(slots, dtype=np.int32)
        numbers[list(self.slots)] = list(self.slots.values())
        return numbers


def _update(update: LowRank, files: AdapterFiles) -> Update:
    a, b = (update.kind, files.rank, update.a, 0), (update.kind, update.outputs, update.b, 0)
    return a, b, update.inputs, files.scale
