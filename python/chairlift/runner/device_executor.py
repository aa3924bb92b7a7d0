"""The interface of a loaded model in torch, whose steps are loaded to its device."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch

from chairlift.runner.buffers import StepBuffers
from chairlift.runner.copy_stream import CopyStream
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.executor import ModelExecutor


class DeviceExecutor(ModelExecutor):
    """A model on `device`.

    On an asynchronous device no method waits for the device: work goes to the current stream, in the order of the calls. Step buffers
    must not change until the step's tokens have arrived on the host. Other arguments may change when a call returns.
    """

    device: torch.device

    def make_buffers(self, count: int, max_tokens: int, max_seqs: int, max_blocks: int, copy_stream: CopyStream) -> list[StepBuffers]:
        """Allocates `count` step buffers and the arrays on the device into which they are loaded."""
        return DeviceBuffers(count, max_tokens, max_seqs, max_blocks, self.device, copy_stream).host

    def load_step(self, buffers: StepBuffers, num_table_writes: int) -> None:
        """Copies a step's arrays to the device."""
        buffers.on_device.load(buffers.index, num_table_writes)

    @abstractmethod
    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the loaded step and keeps its hidden states for `logits`.

        A model whose steps overlap must read the input ids from `buffers.on_device`: the host does not know all of them yet. The block
        tables on the device are this step's; those of `buffers` are only valid during the call.
        """

    @abstractmethod
    def logits(self, at: np.ndarray) -> torch.Tensor:
        """Logits of the last step at token positions `at`, integers [N], on the device."""
