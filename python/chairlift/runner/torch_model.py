"""The model in torch, with its KV cache: for devices that torch drives best."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from chairlift.config import EngineConfig
from chairlift.layers.attention import plan_attention
from chairlift.models.config import ModelConfig
from chairlift.models.llama import Llama, Step
from chairlift.runner.buffers import StepBuffers
from chairlift.runner.cache import KvCache
from chairlift.runner.model import Pairs
from chairlift.runner.precision import Precision
from chairlift.runner.weights import open_weights


class TorchModel:
    """A `DeviceModel` in torch, which keeps weights and KV in one dtype and computes in it."""

    batch_invariant = False
    """The kernels of attention, and on a GPU those of linear layers too, sum in an order that follows from how much there is to do."""

    cache: KvCache
    """Made by `allocate`."""
    hidden: torch.Tensor
    """The last step's hidden states."""

    def __init__(self, config: ModelConfig, llama: Llama, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.llama, self.dtype, self.device = config, llama, dtype, device
        self.windows = frozenset(config.windows)

    @classmethod
    @torch.inference_mode()
    def load(cls, config: EngineConfig, directory: Path, model: ModelConfig, precision: Precision) -> TorchModel:
        """Loads the weights of a directory (see `Loader`): in the form of `precision`, or in fp32 on a CPU."""
        device = torch.device(config.device)
        dtype: torch.dtype = torch.float32 if device.type == "cpu" else getattr(torch, precision.weights)
        weights = open_weights(config, directory, dtype, device)
        llama = Llama(model, weights)
        weights.finish(model)
        return cls(model, llama, dtype, device)

    @torch.inference_mode()
    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Makes the KV cache."""
        self.cache = KvCache(self.config, num_blocks, block_size, self.dtype, self.device, host_blocks)

    @torch.inference_mode()
    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks within the cache."""
        self.cache.copy(pairs)

    @torch.inference_mode()
    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host, and then back."""
        self.cache.swap(outs, ins)

    @torch.inference_mode()
    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the step that the buffers describe."""
        attention = plan_attention(
            buffers.slots[:num_tokens],
            buffers.query_starts[: num_seqs + 1],
            buffers.context_lens[:num_seqs],
            buffers.block_tables[buffers.rows[:num_seqs]],
            heads=self.config.num_heads,
            windows=self.windows,
            cache=self.cache.tensor[0],
        )
        input_ids = torch.from_numpy(buffers.input_ids[:num_tokens]).to(self.device)
        positions = torch.from_numpy(buffers.positions[:num_tokens]).to(self.device)
        self.hidden = self.llama.forward(Step(input_ids, positions, attention), self.cache.tensor)

    @torch.inference_mode()
    def logits(self, at: np.ndarray) -> torch.Tensor:
        """What the last step says of the tokens after those at places `at`."""
        return self.llama.logits(self.hidden, torch.from_numpy(at).to(self.device)).float()

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
