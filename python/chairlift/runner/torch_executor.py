"""The model in torch, with its KV cache: for devices that torch drives best, and for models that only transformers knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from chairlift.checkpoint.gguf import LINK
from chairlift.config import EngineConfig
from chairlift.errors import UnsupportedModel
from chairlift.layers.attention import AttentionPlan, plan_attention
from chairlift.layers.device_attention import DevicePlan
from chairlift.layers.linear import FORMS
from chairlift.layers.tensor_parallel import ALONE, TensorParallelGroup
from chairlift.models.config import ModelConfig
from chairlift.models.llama import LayerCache, Llama, Step, kv_scales
from chairlift.models.shape import KvSpec, ModelShape
from chairlift.runner.buffers import StepBuffers
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.executor import Pairs
from chairlift.runner.memory.kv_cache import KvCache
from chairlift.runner.memory.precision import Precision
from chairlift.runner.tensor_parallel.shards import Shards
from chairlift.runner.weights import DummyWeights, open_weights


class Network(Protocol):
    """A model's layers in torch, ours or transformers'."""

    def forward(self, step: Step, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Runs a step over each layer's cache; returns hidden states [T, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """What a step's hidden states say of the tokens after those at places `at` [N]; returns [N, vocabulary]."""
        ...


class TorchExecutor:
    """A `ModelExecutor` in torch, which keeps weights and KV in the dtype that it computes in, or in 8 bits."""

    batch_invariant = False
    """The kernels of attention, and on a GPU those of linear layers too, sum in an order that follows from how much there is to do."""

    cache: KvCache
    """Made by `allocate`."""
    hidden: torch.Tensor
    """The last step's hidden states."""

    def __init__(self, network: Network, specs: Sequence[KvSpec], kv: torch.dtype, device: torch.device) -> None:
        self.network, self.specs, self.kv, self.device = network, specs, kv, device
        self.windows = frozenset(spec.window for spec in specs)
        self.in_kernels = device.type == "cuda"
        """Whether attention is our kernels for GPUs, which graphs can be made of; tests have them interpreted on a CPU."""

    @classmethod
    @torch.inference_mode()
    def load(
        cls, config: EngineConfig, directory: Path, model: ModelShape, precision: Precision, peers: TensorParallelGroup = ALONE
    ) -> TorchExecutor:
        """Loads the weights of a directory (see `Loader`) for what `precision` computes in.

        Among `peers`, `model` is what this process has of it, and so much is loaded.
        """
        device = torch.device(config.device)
        dtype: torch.dtype = getattr(torch, precision.compute)
        network: Network
        if isinstance(model, ModelConfig):
            weights = open_weights(config, directory, dtype, device, 1 - model.norm_offset)
            form = precision.quantization if precision.quantization in FORMS else None
            network = Llama(model, weights if peers.size == 1 else Shards(weights, peers), peers, form)
            weights.finish(model)
        else:
            network = _from_transformers(config, directory, model, dtype, device)
        return cls(network, model.kv_specs, torch.float8_e4m3fn if precision.kv == "fp8" else dtype, device)

    @torch.inference_mode()
    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Makes the KV cache."""
        self.cache = KvCache(self.specs, num_blocks, block_size, self.kv, self.device, host_blocks)

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
        self.run(buffers.on_device, num_tokens, self._plan(buffers, num_tokens, num_seqs))

    @torch.inference_mode()
    def run(self, there: DeviceBuffers, num_tokens: int, attention: AttentionPlan) -> None:
        """Runs the step that is on the device, for there the tokens are known that the step before has sampled."""
        input_ids, positions = there.input_ids[:num_tokens], there.positions[:num_tokens]
        self.hidden = self.network.forward(Step(input_ids, positions, attention), self.cache.layers)

    @torch.inference_mode()
    def logits(self, at: np.ndarray) -> torch.Tensor:
        """What the last step says of the tokens after those at places `at`."""
        return self.network.logits(self.hidden, torch.from_numpy(at).to(self.device, non_blocking=True)).float()

    def _plan(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> AttentionPlan:
        there, lengths = buffers.on_device, (buffers.query_starts[: num_seqs + 1], buffers.context_lens[:num_seqs])
        if self.in_kernels:
            rows, starts, lens = there.batch_slots[:num_seqs], there.query_starts[: num_seqs + 1], there.context_lens[:num_seqs]
            slots = there.slot_mapping[:num_tokens]
            return DevicePlan.make(slots, starts, lens, rows, there.block_tables, lengths=lengths, windows=self.windows)
        size, tables = self.cache.block_size, buffers.block_tables[buffers.batch_slots[:num_seqs]]
        return plan_attention(
            buffers.slot_mapping[:num_tokens], *lengths, tables, windows=self.windows, block_size=size, device=self.device
        )

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Nothing runs elsewhere."""


def _from_transformers(config: EngineConfig, directory: Path, model: ModelShape, dtype: torch.dtype, device: torch.device) -> Network:
    # Here, for importing transformers takes seconds.
    from chairlift.models.transformers_config import TransformersConfig
    from chairlift.models.transformers_model import TransformersModel
    from chairlift.runner.self_check import check

    assert isinstance(model, TransformersConfig)
    made = DummyWeights(config.seed, dtype, device) if config.load_format == "dummy" else None
    if made is None and (directory / LINK).is_symlink():
        raise UnsupportedModel(f"{(directory / LINK).resolve()}: {model.not_ours}, and transformers' code reads safetensors alone")
    longest = config.max_model_len or model.max_position_embeddings
    network = TransformersModel.load(model, directory, dtype, device, longest, made)
    weights = made or open_weights(config, directory, dtype, device)
    network.scales = [kv_scales(weights, layer, spec.kv_heads) for layer, spec in enumerate(model.kv_specs)]
    check(network, dtype, device, model.vocab_size, model.architecture)
    return network
