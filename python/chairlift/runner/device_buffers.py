"""The arrays of a step on the device."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.kernels.resolve_reference import resolve_reference
from chairlift.runner.buffers import Layout, StepBuffers
from chairlift.runner.copy_stream import CopyStream


class DeviceBuffers:
    """The device's copy of the next step's arrays: int32 tensors named as in `StepBuffers`, at fixed addresses.

    `host` are the buffers that the scheduler fills, one per step in flight: the device may still copy from one while the next is
    filled. A buffer may be refilled when the tokens of its step have arrived. All work goes to the current stream.
    """

    def __init__(
        self,
        count: int,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        device: torch.device,
        copy_stream: CopyStream,
        state_slots: int = 0,
    ) -> None:
        self.sizes, self.state_slots = (count, max_tokens, max_seqs, max_blocks), state_slots
        layout = Layout(max_tokens, max_seqs, max_blocks, table_writes=True, state_slots=state_slots)
        self._pinned = [copy_stream.pinned(layout.size) for _ in range(count)]
        tables = np.zeros((max_seqs, max_blocks), dtype=np.int32)
        self.host = [StepBuffers(layout, pinned.numpy(), tables, index) for index, pinned in enumerate(self._pinned)]
        for buffers in self.host:
            buffers.on_device = self
        self._packed = torch.zeros(layout.size, dtype=torch.int32, device=device)
        parts = {name: self._packed[part] for name, part in layout.slices.items()}
        self.input_ids, self.positions, self.slot_mapping = parts["input_ids"], parts["positions"], parts["slot_mapping"]
        self.query_starts, self.context_lens, self.batch_slots = parts["query_starts"], parts["context_lens"], parts["batch_slots"]
        self.sample_at, self.sample_slots = parts["sample_at"], parts["sample_slots"]
        self.block_tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=device)
        """The KV blocks of the sequence in each batch slot, kept from step to step."""
        self._writes_at = layout.slices["table_writes"].start
        self._last_load = 0, 0

    def pad(self, buffer_index: int, num_seqs: int, num_samples: int, size: int) -> None:
        """Pads a decode step of `num_seqs` sequences to `size`, before it is loaded.

        Padding rows write no KV, and their samples go to the padding slot behind the batch slots.
        """
        host, seqs, samples = self.host[buffer_index], slice(num_seqs, size), slice(num_samples, size)
        host.input_ids[seqs] = host.positions[seqs] = host.sample_at[samples] = 0
        host.slot_mapping[seqs] = -1
        host.sample_slots[samples] = self.sizes[2]

    def load(self, buffer_index: int, num_table_writes: int) -> None:
        """Copies the arrays of `host[buffer_index]` in one transfer and applies its block table writes."""
        self._last_load = buffer_index, num_table_writes
        end = self._writes_at + 2 * num_table_writes
        self._packed[:end].copy_(self._pinned[buffer_index][:end], non_blocking=True)
        if num_table_writes:
            writes = self._packed[self._writes_at : end].view(-1, 2)
            self.block_tables.view(-1)[writes[:, 0]] = writes[:, 1]

    def loaded(self, num_tokens: int, num_seqs: int) -> tuple[int, int, bytes]:
        """The first arguments with which another process `receive`s the step that was loaded last.

        The bytes are the entries that the step uses of the arrays that a forward pass reads. Input ids are not among them.
        """
        buffer_index, num_table_writes = self._last_load
        parts = self._used(buffer_index, num_table_writes, num_tokens, num_seqs)
        return buffer_index, num_table_writes, np.concatenate(parts).tobytes()

    def receive(self, buffer_index: int, num_table_writes: int, packed: bytes, num_tokens: int, num_seqs: int) -> None:
        """Loads a step that another process has loaded into buffers of the same sizes."""
        parts = self._used(buffer_index, num_table_writes, num_tokens, num_seqs)
        ends = np.cumsum([part.size for part in parts])
        for part, sent in zip(parts, np.split(np.frombuffer(packed, dtype=np.int32), ends[:-1]), strict=True):
            part[:] = sent
        writes = parts[-1].reshape(-1, 2)
        self.host[buffer_index].block_tables.reshape(-1)[writes[:, 0]] = writes[:, 1]
        self.load(buffer_index, num_table_writes)

    def _used(self, buffer_index: int, num_table_writes: int, num_tokens: int, num_seqs: int) -> list[np.ndarray]:
        """Views of the used entries of a host buffer; the table writes come last."""
        host, arrays = self.host[buffer_index], self._pinned[buffer_index].numpy()
        return [
            host.query_starts[: num_seqs + 1],
            host.context_lens[:num_seqs],
            host.batch_slots[:num_seqs],
            host.positions[:num_tokens],
            host.slot_mapping[:num_tokens],
            arrays[self._writes_at : self._writes_at + 2 * num_table_writes],
        ]

    def resolve(self, num_tokens: int, last_token: torch.Tensor) -> None:
        """Replaces -(slot + 1) in the input ids by the slot's entry of `last_token`, int32 [slots]."""
        ids = self.input_ids[:num_tokens]
        ids.copy_(_resolved(ids, last_token))


def _resolved(input_ids: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """Input ids with the slots' last tokens; token 0 for a slot without one, whose result is not used."""
    if input_ids.is_cuda:
        from chairlift.kernels.resolve import resolve  # imports triton

        return resolve(input_ids, last_token)
    return resolve_reference(input_ids, last_token)
