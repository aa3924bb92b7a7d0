"""Recurrent layers over a ragged token axis: short convolutions, gated delta rules and state spaces, with states in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from chairlift.kernels import recurrent_reference
from chairlift.layers.device_attention import send


class LayerState(NamedTuple):
    """One layer's states in all slots, fp32: the last inputs of the convolution [slots, taps - 1, channels], the earliest first, and the
    matrices of the heads [slots, heads, key size, value size].
    """

    columns: torch.Tensor
    matrices: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateStep:
    """How a step of S sequences and T tokens moves their states on. int32 tensors on the model's device.

    Sequence i has the tokens query_starts[i] to query_starts[i + 1], and token t is of sequence rows[t]. Its entries of `writes` [any, 2]
    are write_starts[i] to write_starts[i + 1], ascending: a number of its tokens in this step, and the slot that gets the state after
    them. The last one is after all of them, in the slot with the state that it begins with, or without a state if its first token is
    at position 0. A sequence without entries is padding. `layers` are the states.
    """

    query_starts: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    writes: torch.Tensor
    write_starts: torch.Tensor
    layers: Sequence[LayerState]


def plan_writes(query_starts: np.ndarray, context_lens: np.ndarray, slots: np.ndarray, saves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `writes` and `write_starts` of a `StateStep`.

    `saves` [any, 3] are the index of a sequence, a number of its tokens in this and all earlier steps, and a slot.
    """
    lengths = np.diff(query_starts)
    computed = context_lens - lengths
    # A sequence's own slot comes last: after all of its tokens there may be a save too.
    sequences = np.concatenate((saves[:, 0], np.arange(len(slots))))
    tokens = np.concatenate((saves[:, 1] - computed[saves[:, 0]], lengths))
    order = np.lexsort((np.arange(len(sequences)), tokens, sequences))
    writes = np.stack((tokens, np.concatenate((saves[:, 2], slots))), 1)[order]
    starts = np.searchsorted(sequences[order], np.arange(len(slots) + 1))
    return writes.astype(np.int32), starts.astype(np.int32)


def plan_states(
    on_device: tuple[torch.Tensor, torch.Tensor],
    lengths: tuple[np.ndarray, np.ndarray],
    slots: np.ndarray,
    saves: np.ndarray,
    layers: Sequence[LayerState],
) -> StateStep:
    """Plans a step. `on_device` are query_starts and positions, `lengths` query_starts and context_lens on the host."""
    query_starts, positions = on_device
    rows = np.repeat(np.arange(len(slots), dtype=np.int32), np.diff(lengths[0]))
    sent, writes, write_starts = send([rows, *plan_writes(*lengths, slots, saves)], positions.device)
    return StateStep(query_starts, positions, sent, writes, write_starts, layers)


class DecodeStates:
    """The arrays of steps in which each of up to `seqs` sequences has one token, with room for a save to each of `slots` slots.

    They keep their addresses, so that a CUDA graph can use them.
    """

    def __init__(self, seqs: int, slots: int, device: torch.device) -> None:
        self._rows = torch.arange(seqs, dtype=torch.int32, device=device)
        self._writes = torch.zeros(seqs + slots, 2, dtype=torch.int32, device=device)
        self._starts = torch.zeros(seqs + 1, dtype=torch.int32, device=device)

    def fill(self, lengths: tuple[np.ndarray, np.ndarray], slots: np.ndarray, saves: np.ndarray) -> None:
        """Writes a step's arrays, given its query_starts and context_lens on the host. Earlier steps may still run."""
        writes, starts = plan_writes(*lengths, slots, saves)
        padded = np.full(len(self._starts), starts[-1], dtype=np.int32)
        padded[: len(starts)] = starts
        sent, sent_starts = send([writes, padded], self._rows.device)
        self._writes[: len(writes)].copy_(sent)
        self._starts.copy_(sent_starts)

    def step(self, query_starts: torch.Tensor, positions: torch.Tensor, layers: Sequence[LayerState]) -> StateStep:
        """The arrays of a step with as many tokens as there are positions."""
        size = len(positions)
        return StateStep(query_starts, positions, self._rows[:size], self._writes, self._starts[: size + 1], layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A causal convolution of each channel: fp32 taps [taps, channels], that of the current token last, and a bias [channels] or none.

    `first` is the first channel's column in a row. If `gated` (LFM2), the input is multiplied by the numbers two widths before it, and the
    output by those one width before it; else the output is y * sigmoid(y).
    """

    taps: torch.Tensor
    bias: torch.Tensor | None
    first: int
    gated: bool

    def __call__(self, projected: torch.Tensor, step: StateStep, columns: torch.Tensor) -> torch.Tensor:
        """Convolves the channels of `projected` [T, any]; returns [T, channels]. Moves `columns`, the layer's last inputs, on."""
        if projected.is_cuda:
            from chairlift.kernels.convolve import convolve  # imports triton, which is only installed for GPUs

            return convolve(projected, columns, self, step)
        return recurrent_reference.convolve(projected, columns, self, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """The first columns of a token's parts: those of its heads in the result of the convolution, the others in the projection."""

    queries: int
    keys: int
    values: int
    gates: int
    steps: int
    betas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Heads with a matrix S [key size, value size] as state.

    A token multiplies S by a decay and adds the outer product of its key and a vector; its output is the transposed S times its query.
    With the gated delta rule (Yang, Kautz and Hatamizadeh, 2024) the vector is beta * (value - decay * transposed S times key), and keys
    and queries have length 1. In a state space (Mamba 2: Dao and Gu, 2024) it is step * value, and `skip` times the value is added to the
    output. The logarithm of the decay is rate * step, and a step is softplus of its input plus `step_bias`, within `limits`.

    `count` heads use the keys and queries of `groups`: head h that of h modulo `groups` if they are `tiled`, else consecutive heads share
    one. Outputs are normalised in groups of `norm_group` numbers with the weights `norm`, of one group or of all, and multiplied by
    z * sigmoid(z) of their gates z, in a state space before the norm. Vectors are fp32.
    """

    count: int
    groups: int
    key_size: int
    value_size: int
    tiled: bool
    rates: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor | None
    limits: tuple[float, float]
    norm: torch.Tensor
    norm_group: int
    eps: float
    offsets: Offsets

    @property
    def delta(self) -> bool:
        """Whether this is the delta rule."""
        return self.skip is None

    def __call__(self, mixed: torch.Tensor, projected: torch.Tensor, step: StateStep, matrices: torch.Tensor) -> torch.Tensor:
        """Computes the outputs [T, count * value size] of `mixed`, the result of the convolution, and moves `matrices` on."""
        if mixed.is_cuda:
            # These import triton, which is only installed for GPUs.
            from chairlift.kernels.advance_heads import advance_heads
            from chairlift.kernels.gated_norm import gated_norm

            return gated_norm(advance_heads(mixed, projected, matrices, self, step), projected, self)
        return recurrent_reference.gated_norm(recurrent_reference.advance_heads(mixed, projected, matrices, self, step), projected, self)
