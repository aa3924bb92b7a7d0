"""What the runner needs of a model, wherever it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from chairlift.config import EngineConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.buffers import StepBuffers
from chairlift.runner.memory.precision import Precision

TIMED_BLOCKS, TIMED_ROUNDS = 8, 5
"""How many blocks are swapped at once to see how long it takes, and how many times."""

Pairs = Iterable[tuple[int, int]]


class ModelExecutor(Protocol):
    """A loaded model with its KV cache.

    Blocks are whole ones over all layers. `device` is where the logits are. `batch_invariant` is whether a sequence's logits are equal
    bit for bit whoever shares its steps, and however it is cut into chunks.

    On a device that works on its own nothing here may wait for it: what is asked is put on its current stream, and done in that order.
    The step buffers hold until the step's tokens have arrived on the host; other arrays may be changed when a call returns.
    """

    device: torch.device
    batch_invariant: bool

    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Makes the KV cache, before anything else is asked: so many blocks, and so many more in the host's memory.

        Raises InvalidSetting where there is no memory for them.
        """

    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks within the cache, one after the other: pairs [n, 2], from and to."""

    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host (device block, host block), and then back (host block, device block)."""

    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the step that the buffers describe, and keeps its hidden states for `logits`.

        Input ids must be taken from `buffers.on_device` by a model that may be asked before the step before has been collected: on the
        host they are not all known then. The block tables there are those of this step, but those of `buffers` only for as long as the
        call lasts.
        """

    def logits(self, at: np.ndarray) -> torch.Tensor:
        """What the last step says of the tokens after those at places `at`, integers [N]: fp32 [N, vocabulary].

        The caller may overwrite it; it holds until the next call.
        """

    def synchronize(self) -> None:
        """Waits until all that was asked so far is done, where a device works on its own."""

    def close(self) -> None:
        """Ends what computes the model elsewhere, if anything does; nothing may be asked afterwards."""


Loader = Callable[[EngineConfig, Path, ModelShape, Precision], ModelExecutor]
"""Loads the weights of a directory, with settings that leave nothing open: their device is cpu or cuda, `threads` a number.

Raises ModelNotFound or UnsupportedModel where it cannot use them.
"""


def time_swap(model: ModelExecutor, blocks: int) -> int:
    """Nanoseconds that a block takes to the host or back, measured on the first `blocks` of both, which nobody may use yet."""
    pairs = [(block, block) for block in range(min(TIMED_BLOCKS, blocks))]
    times = []
    for _ in range(1 + TIMED_ROUNDS):
        began = time.perf_counter_ns()
        model.swap(pairs, pairs)
        model.synchronize()
        times.append(time.perf_counter_ns() - began)
    # The first round is the first to touch this memory.
    return max(1, round(statistics.median(times[1:]) / (2 * len(pairs))))
