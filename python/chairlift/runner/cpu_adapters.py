"""LoRA adapters of the CPU kernels' decoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from chairlift import _core
from chairlift.checkpoint.adapter import AdapterFiles, LowRank
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.runner.weights import Part

Update = tuple[Part, Part, int, float]
"""The update of one tensor as `_core.Adapter` takes it."""


class CpuAdapters:
    """Packs and loads adapters, and knows which one each batch slot has (see `AdapterStore`)."""

    def __init__(self, decoder: _core.Decoder, model: ModelConfig, isa: str) -> None:
        self._decoder, self._model, self._isa = decoder, model, isa
        self._slots: dict[int, int] = {}  # the adapters' numbers, of the slots that have one

    def pack(self, files: AdapterFiles) -> _core.Adapter:
        """Packs an adapter. Raises UnsupportedModel if it was made for another base."""
        _check(files, self._model)

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

    def assign(self, slot: int, number: int) -> None:
        """Sets the adapter of a batch slot; 0 for none."""
        self._slots.pop(slot, None)
        if number:
            self._slots[slot] = number

    def by_slot(self, slots: int) -> np.ndarray | None:
        """The number of each slot's adapter, int32 [slots]; None if no slot has one."""
        if not self._slots:
            return None
        numbers = np.zeros(slots, dtype=np.int32)
        numbers[list(self._slots)] = list(self._slots.values())
        return numbers


def _update(update: LowRank, files: AdapterFiles) -> Update:
    a, b = (update.kind, files.rank, update.a, 0), (update.kind, update.outputs, update.b, 0)
    return a, b, update.inputs, files.scale


def _check(files: AdapterFiles, model: ModelConfig) -> None:
    """Raises UnsupportedModel for an adapter whose shapes are not those of the model's layers."""
    if len(model.projections.qkv) == 1 or len(model.projections.gate_up) == 1:
        raise UnsupportedModel(f"{model.architecture} has fused projections, for which adapters are not supported")
    queries, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = {
        **{"q_proj": (queries, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, queries)},
        **{"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)},
    }
    another = f"adapter {files.directory}: it is for another base"
    for (layer, module), update in files.updates.items():
        if layer >= model.num_layers:
            raise UnsupportedModel(f"{another}: it changes layer {layer}, and the model has {model.num_layers} layers")
        if (update.outputs, update.inputs) != shapes[module]:
            found, expected = f"{update.outputs}x{update.inputs}", "{}x{}".format(*shapes[module])
            raise UnsupportedModel(f"{another}: {module} of layer {layer} is {found}, and the model's is {expected}")
