"""The interface of a loaded model: the CPU, torch and tensor-parallel executors implement it. Without torch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from chairlift import _core
from chairlift.config import EngineConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.buffers import Pairs, StepBuffers
from chairlift.runner.interface import AdapterStore
from chairlift.runner.memory.precision import Precision

Logits = Any
"""Logits, fp32 [N, vocabulary]: a numpy array of a model in Rust, a tensor of a model in torch."""

SWAP_BLOCKS, SWAP_ROUNDS = 8, 5
"""Blocks per round and rounds of the swap measurement."""


class ModelExecutor(ABC):
    """A loaded model with its KV cache.

    A block holds the keys and values of all layers. `batch_invariant` says whether a sequence's logits are bitwise equal whatever else
    is in the batch and however its prompt is chunked.
    """

    batch_invariant: bool
    adapters: AdapterStore | None = None
    """The LoRA adapters; None if the model cannot have any."""

    @property
    def progress(self) -> int:
        """A number that changes while the model computes; always 0 if the executor does not know."""
        return 0

    @abstractmethod
    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Allocates the KV cache on the device and on the host. Called before any step.

        Raises InvalidSetting if there is not enough memory.
        """

    @abstractmethod
    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks within the cache, in order: pairs [n, 2], from and to."""

    def allocate_states(self, slots: int) -> None:
        """Allocates slots for recurrent states. Called before any step, and only for models with recurrent layers.

        Raises InvalidSetting if there is not enough memory.
        """
        raise NotImplementedError

    def copy_states(self, pairs: np.ndarray) -> None:
        """Copies recurrent states between slots, in order: pairs [n, 2], from and to.

        Only models with recurrent layers have them.
        """
        raise NotImplementedError

    @abstractmethod
    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host (device block, host block), then back (host block, device block)."""

    @abstractmethod
    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the step in the buffers and keeps its hidden states for `logits`.

        A model with recurrent layers also moves the states of the step's sequences on and saves those that the buffers name.
        """

    @abstractmethod
    def logits(self, at: np.ndarray) -> Logits:
        """Logits of the last step at token positions `at`, integers [N].

        The caller may overwrite the result. It is valid until the next call.
        """

    def states(self, at: np.ndarray) -> np.ndarray:
        """The last step's hidden states after the last norm at token positions `at`, scaled to length 1: float32 [N, hidden size].

        Only models in Rust have them.
        """
        raise NotImplementedError

    @property
    def kv_blocks(self) -> _core.KvCache | None:
        """The KV cache, if its blocks can be read and written: that of models in Rust. For after `allocate`."""
        return None

    @property
    def state_storage(self) -> _core.StateCache | None:
        """The recurrent states, if they can be read and written: those of models in Rust. For after `allocate_states`."""
        return None

    def synchronize(self) -> None:  # noqa: B027 (most models have nothing to wait for)
        """Waits until all queued work is done, on an asynchronous device."""

    def close(self) -> None:  # noqa: B027
        """Ends other processes of the model, if any. Nothing may be called afterwards."""


Loader = Callable[[EngineConfig, Path, ModelShape, Precision], ModelExecutor]
"""Loads the weights of a directory. The settings are complete: `device` is cpu or cuda, `threads` a number.

Raises ModelNotFound or UnsupportedModel.
"""


def time_swap(model: ModelExecutor, blocks: int) -> int:
    """Measures the nanoseconds to copy one block to the host or back, on the first `blocks` blocks, which must be unused."""
    pairs = [(block, block) for block in range(min(SWAP_BLOCKS, blocks))]
    times = []
    for _ in range(1 + SWAP_ROUNDS):
        began = time.perf_counter_ns()
        model.swap(pairs, pairs)
        model.synchronize()
        times.append(time.perf_counter_ns() - began)
    # The first round touches the memory for the first time and does not count.
    median = sorted(times[1:])[SWAP_ROUNDS // 2]
    return max(1, round(median / (2 * len(pairs))))
