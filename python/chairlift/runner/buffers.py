"""What goes into a step and comes out of it: arrays that the scheduler writes and the model reads, and what was sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from chairlift.runner.device_buffers import DeviceBuffers

LINE = 32
"""Each array begins at a multiple of so many integers: 128 bytes, which a device reads at once."""


class Layout:
    """Where the arrays of a step lie in one allocation of `size` int32, for up to T tokens of S sequences with B blocks each.

    `places` has a slice for each, in the order of their memory. The list of table writes comes last, since most steps need little of it,
    and only where `table_writes` says that block tables are kept elsewhere too.
    """

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int, *, table_writes: bool = False) -> None:
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
        if table_writes:
            lengths["table_writes"] = 2 * max_seqs * max_blocks
        self.places: dict[str, slice] = {}
        self.size = 0
        for name, length in lengths.items():
            self.places[name] = slice(self.size, self.size + length)
            self.size += -(-length // LINE) * LINE


class StepBuffers:
    """Flat int32 arrays for the steps that go through them one after the other.

    Sequence i of a step owns the tokens query_starts[i] to query_starts[i + 1]; block_tables is indexed by row, all else by the
    sequence's or token's place in the step.
    """

    input_ids: np.ndarray
    """-(row + 1) stands for the token that the row sampled last, where it is not known on the host yet."""
    positions: np.ndarray
    slot_mapping: np.ndarray
    """Where each token's key and value go: block * block_size + offset."""
    query_starts: np.ndarray
    context_lens: np.ndarray
    """Tokens of each sequence, those of this step included."""
    batch_slots: np.ndarray
    """The row that each sequence keeps for as long as it runs."""
    sample_at: np.ndarray
    """Places on the token axis whose next token is wanted."""
    sample_slots: np.ndarray
    copies: np.ndarray
    """Pairs of blocks, from and to, copied before the forward pass."""
    on_device: DeviceBuffers
    """The same arrays on the device; only where a model in torch runs."""

    def __init__(self, layout: Layout, packed: np.ndarray | None = None, block_tables: np.ndarray | None = None) -> None:
        """Lays the arrays out in `packed`, int32 [layout.size], or in memory of its own.

        `block_tables` [S, B] are kept from step to step, with only what changes written: buffers that take turns have the same ones.
        """
        self._packed = np.zeros(layout.size, dtype=np.int32) if packed is None else packed
        self._places = layout.places
        for name, place in layout.places.items():
            setattr(self, name, self._packed[place])
        shape = layout.max_seqs, layout.max_blocks
        self.block_tables = np.zeros(shape, dtype=np.int32) if block_tables is None else block_tables

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, as the scheduler wants them."""
        return {name: self._packed[place] for name, place in self._places.items()} | {"block_tables": self.block_tables}


class Sampled(NamedTuple):
    """What a step gave, by place in its sample."""

    tokens: np.ndarray
    """int32 [N], the receiver's own; -1 where the model gave none: its logits are not finite, or nothing may be drawn."""
    logprobs: np.ndarray
    """float32 [N]: log-probabilities of the tokens, 0 where they were not asked for; empty if nobody asked."""
    details: dict[int, bytes]
    """A line of `logprobs.score` with as many likeliest tokens as the row asked for."""
    prompts: list[tuple[int, bytes]]
    """What is told of prompts: tags, and lines of `logprobs.score`; for one tag in the order of its tokens."""
