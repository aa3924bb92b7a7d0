"""The arrays of a step on the device that runs it."""

from __future__ import annotations

import numpy as np
import torch

from chairlift.kernels.resolve_reference import resolve_reference
from chairlift.runner.buffers import Layout, StepBuffers
from chairlift.runner.copy_stream import CopyStream


class DeviceBuffers:
    """What the step that comes next on the device reads: int32 tensors named as in `StepBuffers`, at the same place for every step.

    `host` are the buffers that the scheduler fills, one for each step that may be under way: the device may still be copying from one
    while the next is filled. One may be filled again when what its step sampled has arrived. Everything here is put on the current
    stream, so that steps follow each other.
    """

    def __init__(self, turns: int, max_tokens: int, max_seqs: int, max_blocks: int, device: torch.device, courier: CopyStream) -> None:
        self.sizes = turns, max_tokens, max_seqs, max_blocks
        layout = Layout(max_tokens, max_seqs, max_blocks, table_writes=True)
        self._pinned = [courier.pinned(layout.size) for _ in range(turns)]
        tables = np.zeros((max_seqs, max_blocks), dtype=np.int32)
        self.host = [StepBuffers(layout, pinned.numpy(), tables) for pinned in self._pinned]
        for buffers in self.host:
            buffers.on_device = self
        self._packed = torch.zeros(layout.size, dtype=torch.int32, device=device)
        parts = {name: self._packed[place] for name, place in layout.places.items()}
        self.input_ids, self.positions, self.slot_mapping = parts["input_ids"], parts["positions"], parts["slot_mapping"]
        self.query_starts, self.context_lens, self.batch_slots = parts["query_starts"], parts["context_lens"], parts["batch_slots"]
        self.sample_at, self.sample_slots = parts["sample_at"], parts["sample_slots"]
        self.block_tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=device)
        """By row, and kept from step to step."""
        self._writes_at = layout.places["table_writes"].start
        self._last = 0, 0

    def pad(self, turn: int, num_seqs: int, num_samples: int, size: int) -> None:
        """Makes the step in `host[turn]`, of one token for each of `num_seqs` sequences, one of `size`, before it is loaded.

        What is added belongs to no sequence and is stored nowhere; what is sampled for it is the row's that is nobody's.
        """
        host, more, samples = self.host[turn], slice(num_seqs, size), slice(num_samples, size)
        host.input_ids[more] = host.positions[more] = host.sample_at[samples] = 0
        host.slot_mapping[more] = -1
        host.sample_slots[samples] = self.sizes[2]

    def load(self, turn: int, num_table_writes: int) -> None:
        """Copies the arrays of `host[turn]`, in one go, and carries out what they change in the block tables."""
        self._last = turn, num_table_writes
        end = self._writes_at + 2 * num_table_writes
        self._packed[:end].copy_(self._pinned[turn][:end], non_blocking=True)
        if num_table_writes:
            writes = self._packed[self._writes_at : end].view(-1, 2)
            self.block_tables.view(-1)[writes[:, 0]] = writes[:, 1]

    def sent(self) -> tuple[int, int, bytes]:
        """What another process needs to `receive` what was loaded last here."""
        turn, num_table_writes = self._last
        return turn, num_table_writes, self._pinned[turn].numpy()[: self._writes_at + 2 * num_table_writes].tobytes()

    def receive(self, turn: int, num_table_writes: int, packed: bytes) -> None:
        """Loads what was loaded in another process, into buffers of the same sizes."""
        arrays = self._pinned[turn].numpy()
        arrays[: len(packed) // 4] = np.frombuffer(packed, dtype=np.int32)
        writes = arrays[self._writes_at : self._writes_at + 2 * num_table_writes].reshape(-1, 2)
        self.host[turn].block_tables.reshape(-1)[writes[:, 0]] = writes[:, 1]
        self.load(turn, num_table_writes)

    def resolve(self, num_tokens: int, last_token: torch.Tensor) -> None:
        """Puts the tokens that rows sampled last, int32 [S], in the place of -(row + 1) in the input ids."""
        ids = self.input_ids[:num_tokens]
        ids.copy_(_resolved(ids, last_token))


def _resolved(input_ids: torch.Tensor, last_token: torch.Tensor) -> torch.Tensor:
    """Input ids with the last token of the row in place of -(row + 1); token 0 for a row that has none, whose result nobody wants."""
    if input_ids.is_cuda:
        from chairlift.kernels.resolve import resolve  # brings triton

        return resolve(input_ids, last_token)
    return resolve_reference(input_ids, last_token)
