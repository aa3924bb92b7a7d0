"""LoRA adapters of the CPU kernels' decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from chairlift import _core
from chairlift.checkpoint.adapter import AdapterFiles, LowRank
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.runner.adapters import updates_for
from chairlift.runner.interface import AdapterStore
from chairlift.runner.weights import Part

Update = tuple[Part, Part, int, float]
"""The update of one tensor as `_core.Adapter` takes it."""
BlockUpdates = tuple[list[Update | None], list[Update | None]]
"""The updates of the tensors of a block's first and second linear layer."""


class CpuAdapters(AdapterStore):
    """The adapters of a model in Rust."""

    def __init__(self, decoder: _core.Decoder, model: ModelConfig, isa: str) -> None:
        super().__init__()
        self._decoder, self._model, self._isa = decoder, model, isa

    def pack(self, files: AdapterFiles) -> _core.Adapter:
        """Packs an adapter. Raises UnsupportedModel if it was made for another base."""
        changes = updates_for(files, self._model)
        blocks = [block for layer in range(self._model.num_layers) for block in self._blocks(changes, layer)]
        return _core.Adapter(blocks, isa=self._isa)

    def _blocks(self, changes: Mapping[tuple[int, str], LowRank], layer: int) -> list[BlockUpdates]:
        """The updates of a layer's blocks, which are those that `cpu_decoder` makes."""
        model, blocks = self._model, list[BlockUpdates]()

        def updates(*modules: str) -> list[Update | None]:
            found = (changes.get((layer, module)) for module in modules)
            return [None if one is None else _update(one) for one in found]

        if model.recurrence and model.recurrence.layers[layer]:
            blocks.append(([], []))
        elif model.attention[layer]:
            queries, keys, gates = updates("q_proj"), updates("k_proj"), list[Update | None]()
            if model.family.projections.gate:
                gates = [None]
            elif model.family.gated_queries:
                queries, gates = _by_head(changes.get((layer, "q_proj")), model.num_heads)
            if model.family.adjacent_pairs:
                queries, keys = (_in_halves(changes.get((layer, name)), model, heads) for name, heads in _heads(model))
            whole = [*queries, *keys, *updates("v_proj"), *gates] if len(model.family.projections.qkv) > 1 else updates("qkv_proj")
            blocks.append((whole, updates("o_proj")))
        if model.feeds[layer]:
            parts = updates(*(("gate_proj", "up_proj") if model.gated else ("up_proj",)))
            if (fused := changes.get((layer, "gate_up_proj"))) is not None:
                rows = fused.b.reshape(2, -1)
                parts = [_update(fused._replace(b=half, outputs=fused.outputs // 2)) for half in rows]
            blocks.append((parts, updates("down_proj")))
        return blocks

    def add(self, packed: Any) -> int:
        """Loads a packed adapter and returns its number. Raises UnsupportedModel if the weights lack a matrix that it changes."""
        try:
            return self._decoder.add_adapter(packed)
        except ValueError as error:  # files may have matrices fused that the architecture has by themselves
            raise UnsupportedModel(f"the adapter changes matrices that these weights do not have by themselves: {error}") from None

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


def _update(update: LowRank) -> Update:
    a, b = (update.kind, update.rank, update.a, 0), (update.kind, update.outputs, update.b, 0)
    return a, b, update.inputs, update.scale


def _heads(model: ModelConfig) -> tuple[tuple[str, int], tuple[str, int]]:
    """The projections whose rows are rotated, and their numbers of heads."""
    return ("q_proj", model.num_heads), ("k_proj", model.num_kv_heads)


def _in_halves(update: LowRank | None, model: ModelConfig, heads: int) -> list[Update | None]:
    """The updates of the tensors that `cpu_decoder` makes of a projection in whose rows rotated pairs are neighbours."""
    rotated, rest = model.rope.dim, model.head_dim - model.rope.dim
    if update is None:
        return [None] * (2 * heads if rest else 1)
    rows = update.b.reshape(heads, model.head_dim, -1)[:, model.head_order]
    if not rest:
        return [_update(update._replace(b=rows.reshape(-1)))]
    parts = [part for head in rows for part in (head[:rotated], head[rotated:])]
    return [_update(update._replace(b=part.reshape(-1), outputs=len(part))) for part in parts]


def _by_head(update: LowRank | None, heads: int) -> tuple[list[Update | None], list[Update | None]]:
    """The updates of each head's query and of each head's gate, which are outputs of one projection, head by head."""
    if update is None:
        return [None] * heads, [None] * heads
    rows = update.outputs // (2 * heads)
    parts = [_update(update._replace(b=part, outputs=rows)) for part in update.b.reshape(2 * heads, -1)]
    return [*parts[::2]], [*parts[1::2]]
