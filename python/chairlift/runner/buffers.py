"""The input and output of a step: arrays that the scheduler writes and the model reads, and the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from chairlift.runner.device_buffers import DeviceBuffers

ALIGNMENT = 32
"""Arrays start at multiples of 32 integers: 128 bytes, a cache line of the device."""

Pairs = Iterable[tuple[int, int]]


class StepSizes(NamedTuple):
    """The number of entries that a step uses in each of its buffers."""

    tokens: int
    seqs: int
    samples: int
    copies: int = 0
    table_writes: int = 0
    state_copies: int = 0
    state_saves: int = 0


class Layout:
    """Offsets of a step's arrays in one allocation of `size` int32, for up to T tokens of S sequences with B blocks each.

    `slices` has a slice per array, in memory order. The list of block table writes comes last, because most steps use little of it, and
    exists only if the device has a copy of the block tables. The arrays of recurrent states exist only if there are `state_slots`.
    """

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int, *, table_writes: bool = False, state_slots: int = 0) -> None:
        self.max_seqs, self.max_blocks = max_seqs, max_blocks
        lengths = {
            "query_starts": max_seqs + 1,
            "context_lens": max_seqs,
            "batch_slots": max_seqs,
            "copies": 2 * max_seqs,
            "sample_at": max_tokens,
            "sample_slots": max_tokens,
            "input_ids": max_tokens,
            "positions": max_tokens,
            "slot_mapping": max_tokens,
        }
        if state_slots:
            lengths |= {"state_slots": max_seqs, "state_copies": 2 * max_seqs, "state_saves": 3 * state_slots}
        if table_writes:
            lengths["table_writes"] = 2 * max_seqs * max_blocks
        self.slices: dict[str, slice] = {}
        self.size = 0
        for name, length in lengths.items():
            self.slices[name] = slice(self.size, self.size + length)
            self.size += -(-length // ALIGNMENT) * ALIGNMENT


class StepBuffers:
    """Flat int32 arrays that successive steps reuse.

    Sequence i of a step has the tokens query_starts[i] to query_starts[i + 1]. block_tables is indexed by batch slot, the other arrays by
    the index of the sequence or token in the step.
    """

    input_ids: np.ndarray
    """-(slot + 1) stands for the token that the slot sampled last, if the host does not know it yet."""
    positions: np.ndarray
    slot_mapping: np.ndarray
    """KV slot of each token: block * block_size + offset."""
    query_starts: np.ndarray
    context_lens: np.ndarray
    """Tokens of each sequence, including those of this step."""
    batch_slots: np.ndarray
    """Batch slot of each sequence; it does not change while the sequence runs."""
    sample_at: np.ndarray
    """Indices of the tokens after which a token is sampled."""
    sample_slots: np.ndarray
    copies: np.ndarray
    """Pairs of blocks (from, to), copied before the forward pass."""
    state_slots: np.ndarray
    """Slot of the recurrent state of each sequence. A sequence whose first token is at position 0 begins without a state, whatever the slot
    holds. This and the next two are unset for a model without recurrent layers."""
    state_copies: np.ndarray
    """Pairs of state slots (from, to), copied one after another before the forward pass and after the blocks."""
    state_saves: np.ndarray
    """Triples of a sequence's index in the step, a number of its tokens, and the slot that gets the state after them."""
    num_state_saves: int
    """The number of triples."""
    on_device: DeviceBuffers
    """The same arrays on the device. Unset for a model that reads the host's arrays."""

    def __init__(self, layout: Layout, packed: np.ndarray | None = None, block_tables: np.ndarray | None = None, index: int = 0) -> None:
        """Lays the arrays out in `packed`, int32 [layout.size], or in newly allocated memory.

        `block_tables` [S, B] persist from step to step and only changes are written: all buffers of an engine share them.
        """
        self.index, self.num_state_saves = index, 0
        self._packed = np.zeros(layout.size, dtype=np.int32) if packed is None else packed
        self._slices = layout.slices
        for name, part in layout.slices.items():
            setattr(self, name, self._packed[part])
        shape = layout.max_seqs, layout.max_blocks
        self.block_tables = np.zeros(shape, dtype=np.int32) if block_tables is None else block_tables

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, for the scheduler."""
        return {name: self._packed[part] for name, part in self._slices.items()} | {"block_tables": self.block_tables}


class Sampled(NamedTuple):
    """The result of a step, by sample index."""

    tokens: np.ndarray
    """int32 [N], owned by the receiver; -1 if the logits are not finite or no token is allowed, NO_TOKEN with an embedding."""
    logprobs: np.ndarray
    """float32 [N]: log-probabilities of the tokens, 0 for requests without them; empty if no request wants them."""
    details: dict[int, bytes]
    """By sample index: a line of `logprobs.score` with as many top tokens as the request wants, or its embedding, float32."""
    prompts: list[tuple[int, bytes]]
    """Log-probabilities of prompts: tags and lines of `logprobs.score`; for one tag in token order."""
    refusals: dict[int, bytes]
    """By index of a failed sample: the reason, a packed InvalidRequest, if its grammar or its biases gave one."""


class PendingResult(Protocol):
    """An array that is being copied to the host."""

    def numpy(self) -> np.ndarray:
        """Waits for the copy and returns it."""


class ReadyResult:
    """An array that is already on the host."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        """The array."""
        return self._array
