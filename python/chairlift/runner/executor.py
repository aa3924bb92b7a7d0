"""The interface of a loaded model: the CPU, torch and tensor-parallel executors implement it."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from chairlift.config import EngineConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.buffers import Layout, Pairs, StepBuffers
from chairlift.runner.copy_stream import CopyStream
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.memory.precision import Precision

SWAP_BLOCKS, SWAP_ROUNDS = 8, 5
"""Blocks per round and rounds of the swap measurement."""


class ModelExecutor(ABC):
    """A loaded model with its KV cache.

    A block holds the keys and values of all layers. `device` is where the logits are. `batch_invariant` says whether a sequence's
    logits are bitwise equal whatever else is in the batch and however its prompt is chunked.

    On an asynchronous device no method waits for the device: work goes to the current stream, in the order of the calls. Step buffers
    must not change until the step's tokens have arrived on the host. Other arguments may change when a call returns.
    """

    device: torch.device
    batch_invariant: bool

    @abstractmethod
    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Allocates the KV cache on the device and on the host. Called before any step.

        Raises InvalidSetting if there is not enough memory.
        """

    def make_buffers(self, count: int, max_tokens: int, max_seqs: int, max_blocks: int, copy_stream: CopyStream) -> list[StepBuffers]:
        """Allocates `count` step buffers and the arrays on the device into which they are loaded."""
        return DeviceBuffers(count, max_tokens, max_seqs, max_blocks, self.device, copy_stream).host

    def load_step(self, buffers: StepBuffers, num_table_writes: int) -> None:
        """Copies a step's arrays to the device."""
        buffers.on_device.load(buffers.index, num_table_writes)

    @abstractmethod
    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks within the cache, in order: pairs [n, 2], from and to."""

    @abstractmethod
    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host (device block, host block), then back (host block, device block)."""

    @abstractmethod
    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the loaded step and keeps its hidden states for `logits`.

        A model whose steps overlap must read the input ids from `buffers.on_device`: the host does not know all of them yet. The block
        tables on the device are this step's; those of `buffers` are only valid during the call.
        """

    @abstractmethod
    def logits(self, at: np.ndarray) -> torch.Tensor:
        """Logits of the last step at token positions `at`, integers [N]: fp32 [N, vocabulary].

        The caller may overwrite the result. It is valid until the next call.
        """

    def synchronize(self) -> None:  # noqa: B027 (most models have nothing to wait for)
        """Waits until all queued work is done, on an asynchronous device."""

    def close(self) -> None:  # noqa: B027
        """Ends other processes of the model, if any. Nothing may be called afterwards."""


class HostExecutor(ModelExecutor):
    """A model that reads the step buffers on the host."""

    device = torch.device("cpu")

    def make_buffers(self, count: int, max_tokens: int, max_seqs: int, max_blocks: int, copy_stream: CopyStream) -> list[StepBuffers]:
        """Allocates step buffers in host memory only."""
        assert count == 1, "steps on the host do not overlap"
        return [StepBuffers(Layout(max_tokens, max_seqs, max_blocks))]

    def load_step(self, buffers: StepBuffers, num_table_writes: int) -> None:
        """Does nothing: the arrays are in host memory."""


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
    return max(1, round(statistics.median(times[1:]) / (2 * len(pairs))))
