"""LoRA adapters of a model in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from chairlift.checkpoint.adapter import AdapterFiles, LowRank
from chairlift.checkpoint.safetensors_file import Array
from chairlift.errors import UnsupportedModel
from chairlift.layers.linear import Linear
from chairlift.layers.lora import Adapter, AdapterRows, LowRankUpdate
from chairlift.models.blocks import Place
from chairlift.models.config import ModelConfig
from chairlift.models.llama import Llama
from chairlift.runner.adapters import updates_for
from chairlift.runner.buffers import StepBuffers
from chairlift.runner.interface import AdapterStore
from chairlift.runner.memory.device_memory import raise_out_of_memory


class TorchAdapters(AdapterStore):
    """The adapters of a model in torch, on its device in fp32."""

    def __init__(self, network: Llama, model: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self._network, self._model, self._device = network, model, device
        self._loaded: dict[int, Adapter] = {}
        self._last = 0

    def pack(self, files: AdapterFiles) -> Adapter:
        """Reads an adapter's matrices to the host. Raises UnsupportedModel if it was made for another base."""
        if self._model.recurrence:
            raise UnsupportedModel(f"{self._model.architecture} has recurrent layers: in torch it takes no adapters. Use --device cpu")
        adapter: dict[Linear, list[LowRankUpdate]] = {}
        for (layer, module), update in updates_for(files, self._model).items():
            place = self._network.layers[layer].projections.get(module)
            if place is None:
                raise UnsupportedModel(
                    f"adapter {files.path}: it changes {module} of layer {layer}, which these weights do not have by itself"
                )
            adapter.setdefault(place.linear, []).append(_update(update, place))
        return adapter

    def add(self, packed: Any) -> int:
        """Copies a packed adapter to the device and returns its number. Raises OutOfMemory."""
        device = self._device
        with raise_out_of_memory("no memory for the adapter: unload others, or lower --gpu-memory-utilization; "):
            loaded = {
                linear: [LowRankUpdate(columns, a.to(device), b.to(device)) for columns, a, b in updates]
                for linear, updates in packed.items()
            }
        # Numbers are not used again.
        self._last += 1
        self._loaded[self._last] = loaded
        return self._last

    def remove(self, number: int) -> None:
        """Frees the memory of an adapter."""
        del self._loaded[number]

    def in_step(self, buffers: StepBuffers, num_seqs: int) -> bool:
        """Whether a sequence of the step in the buffers has an adapter."""
        return bool(self.slots) and not self.slots.keys().isdisjoint(buffers.batch_slots[:num_seqs].tolist())

    def rows(self, buffers: StepBuffers, num_seqs: int) -> AdapterRows | None:
        """The rows with adapters of the step in the buffers, by the adapters' numbers; None if it has none."""
        if not self.in_step(buffers, num_seqs):
            return None
        starts, rows = buffers.query_starts[: num_seqs + 1].tolist(), dict[int, list[int]]()
        for i, slot in enumerate(buffers.batch_slots[:num_seqs].tolist()):
            if number := self.slots.get(slot):
                rows.setdefault(number, []).extend(range(starts[i], starts[i + 1]))
        return AdapterRows(
            [(self._loaded[number], torch.tensor(rows[number]).to(self._device, non_blocking=True)) for number in sorted(rows)]
        )


def _update(update: LowRank, place: Place) -> LowRankUpdate:
    a = _matrix(update.a, update.kind, update.rank, update.inputs)
    b = _matrix(update.b, update.kind, update.outputs, update.rank) * update.scale
    return LowRankUpdate(place.columns, a, b if place.order is None else b[place.order])


def _matrix(data: Array, kind: str, rows: int, columns: int) -> torch.Tensor:
    """Bytes as a matrix in fp32."""
    # Copied, because the bytes may be a file's.
    return torch.from_numpy(np.array(data)).view(getattr(torch, kind)).view(rows, columns).float()
