"""The executor in torch: for CUDA devices, and for models that the CPU kernels do not support."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from chairlift.checkpoint.weight_files import gguf_link, weight_files
from chairlift.config import EngineConfig
from chairlift.layers.attention import AttentionPlan, plan_attention
from chairlift.layers.device_attention import DevicePlan, splits_at_once
from chairlift.layers.lora import AdapterRows
from chairlift.layers.recurrent import StateStep, plan_states
from chairlift.layers.tensor_parallel import ALONE, TensorParallelGroup
from chairlift.models.config import ModelConfig
from chairlift.models.forward_batch import ForwardBatch, LayerCache
from chairlift.models.llama import Llama, kv_scales
from chairlift.models.recurrence import RecurrentLayers
from chairlift.models.shape import KvSpec, ModelShape
from chairlift.runner.buffers import Pairs, StepBuffers
from chairlift.runner.device_buffers import DeviceBuffers
from chairlift.runner.executor import ModelExecutor
from chairlift.runner.memory.kv_cache import KvCache
from chairlift.runner.memory.precision import EIGHT_BITS, Precision
from chairlift.runner.memory.state_cache import StateCache
from chairlift.runner.tensor_parallel.shards import Shards
from chairlift.runner.torch_adapters import TorchAdapters
from chairlift.runner.torch_weights import TorchDummyWeights, TorchWeights, open_torch_weights
from chairlift.runner.weights import DummyWeights

log = logging.getLogger("chairlift")


class DeviceExecutor(ModelExecutor):
    """A model on `device`.

    On an asynchronous device no method waits for the device: work goes to the current stream, in the order of the calls. Step buffers
    must not change until the step's tokens have arrived on the host. Other arguments may change when a call returns.
    """

    device: torch.device
    adapters: TorchAdapters | None = None
    """The LoRA adapters, of our own layers in one process."""

    @abstractmethod
    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the loaded step and keeps its hidden states for `logits`.

        A model whose steps overlap must read the input ids from `buffers.on_device`: the host does not know all of them yet. The block
        tables on the device are this step's; those of `buffers` are only valid during the call.
        """

    @abstractmethod
    def logits(self, at: np.ndarray) -> torch.Tensor:
        """Logits of the last step at token positions `at`, integers [N], on the device."""


class Network(Protocol):
    """A model's layers in torch: chairlift's own or transformers'."""

    def forward(self, batch: ForwardBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Runs a step over each layer's cache; returns hidden states [T, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Logits of a step at token positions `at` [N]; returns [N, vocabulary]."""
        ...


class TorchExecutor(DeviceExecutor):
    """A model in torch. Weights and KV have the compute dtype or 8 bits."""

    batch_invariant = False
    """Summation order depends on batch shape, in attention and on a GPU also in linear layers."""

    cache: KvCache
    """Set by `allocate`."""
    recurrent_states: StateCache | None = None
    """The recurrent states. Set by `allocate_states`."""
    hidden: torch.Tensor
    """The last step's hidden states."""

    def __init__(
        self,
        network: Network,
        specs: Sequence[KvSpec],
        kv: torch.dtype,
        device: torch.device,
        adapters: TorchAdapters | None = None,
        recurrence: RecurrentLayers | None = None,
    ) -> None:
        self.network, self.specs, self.kv, self.device = network, specs, kv, device
        self.adapters, self._recurrence = adapters, recurrence
        self.windows = frozenset(spec.window for spec in specs)
        self.splits_at_once = splits_at_once(max(spec.kv_heads for spec in specs), device)
        self.in_kernels = device.type == "cuda"
        """Whether attention runs in our GPU kernels, which graphs can capture. Tests interpret them on a CPU."""

    @classmethod
    @torch.inference_mode()
    def load(
        cls, config: EngineConfig, directory: Path, model: ModelShape, precision: Precision, group: TensorParallelGroup = ALONE
    ) -> TorchExecutor:
        """Loads the weights of a directory (see `Loader`). In a tensor-parallel group, `model` is this process's part."""
        device = torch.device(config.device)
        dtype: torch.dtype = getattr(torch, precision.compute)
        network: Network
        adapters = None
        if isinstance(model, ModelConfig):
            weights = open_torch_weights(config, directory, dtype, device, 1 - model.family.norm_offset, model.scheme)
            quantization = precision.quantization if precision.quantization in EIGHT_BITS else None
            source = weights if group.size == 1 else Shards(weights, group)
            network = Llama(model, source, group, quantization, precision.rounds_activations, config.max_model_len)
            if group.size == 1:
                adapters = TorchAdapters(network, model, device)
            weights.weights.finish(model)
        else:
            network = _from_transformers(config, directory, model, dtype, device)
        recurrence = model.recurrence if isinstance(model, ModelConfig) else None
        return cls(network, model.kv_specs, torch.float8_e4m3fn if precision.kv == "fp8" else dtype, device, adapters, recurrence)

    @torch.inference_mode()
    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Allocates the KV cache."""
        self.cache = KvCache(self.specs, num_blocks, block_size, self.kv, self.device, host_blocks)

    @torch.inference_mode()
    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks within the cache."""
        self.cache.copy(pairs)

    @torch.inference_mode()
    def allocate_states(self, slots: int) -> None:
        """Allocates slots for recurrent states."""
        assert self._recurrence is not None
        self.recurrent_states = StateCache(self._recurrence, slots, self.device)

    @torch.inference_mode()
    def copy_states(self, pairs: np.ndarray) -> None:
        """Copies recurrent states between slots."""
        assert self.recurrent_states is not None
        self.recurrent_states.copy(pairs)

    @torch.inference_mode()
    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host, then back."""
        self.cache.swap(outs, ins)

    @torch.inference_mode()
    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the loaded step."""
        adapters = None if self.adapters is None else self.adapters.rows(buffers, num_seqs)
        states = None if self.recurrent_states is None else self._plan_states(self.recurrent_states, buffers, num_tokens, num_seqs)
        self.run(buffers.on_device, num_tokens, self._plan(buffers, num_tokens, num_seqs), adapters, states)

    @torch.inference_mode()
    def run(
        self,
        step: DeviceBuffers,
        num_tokens: int,
        attention: AttentionPlan,
        adapters: AdapterRows | None = None,
        states: StateStep | None = None,
    ) -> None:
        """Runs the step from the arrays on the device, where the previous step's tokens are known."""
        input_ids, positions = step.input_ids[:num_tokens], step.positions[:num_tokens]
        self.hidden = self.network.forward(ForwardBatch(input_ids, positions, attention, adapters, states), self.cache.layers)

    @torch.inference_mode()
    def logits(self, at: np.ndarray) -> torch.Tensor:
        """Logits of the last step at token positions `at`."""
        return self.network.logits(self.hidden, torch.from_numpy(at).to(self.device, non_blocking=True)).float()

    def _plan_states(self, states: StateCache, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> StateStep:
        step, lengths = buffers.on_device, (buffers.query_starts[: num_seqs + 1], buffers.context_lens[:num_seqs])
        on_device = step.query_starts[: num_seqs + 1], step.positions[:num_tokens]
        saves = buffers.state_saves[: 3 * buffers.num_state_saves].reshape(-1, 3)
        return plan_states(on_device, lengths, buffers.state_slots[:num_seqs], saves, states.layers)

    def _plan(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> AttentionPlan:
        step, lengths = buffers.on_device, (buffers.query_starts[: num_seqs + 1], buffers.context_lens[:num_seqs])
        if self.in_kernels:
            batch_slots, starts, lens = step.batch_slots[:num_seqs], step.query_starts[: num_seqs + 1], step.context_lens[:num_seqs]
            slot_mapping = step.slot_mapping[:num_tokens]
            return DevicePlan.make(
                slot_mapping,
                starts,
                lens,
                batch_slots,
                step.block_tables,
                lengths=lengths,
                windows=self.windows,
                at_once=self.splits_at_once,
            )
        size, tables = self.cache.block_size, buffers.block_tables[buffers.batch_slots[:num_seqs]]
        return plan_attention(
            buffers.slot_mapping[:num_tokens], *lengths, tables, windows=self.windows, block_size=size, device=self.device
        )

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _from_transformers(config: EngineConfig, directory: Path, model: ModelShape, dtype: torch.dtype, device: torch.device) -> Network:
    # Imported here because transformers takes seconds to import.
    from chairlift.models.transformers_config import TransformersConfig
    from chairlift.models.transformers_model import TransformersModel
    from chairlift.runner.self_check import check

    assert isinstance(model, TransformersConfig)
    dummy, file = config.load_format == "dummy", gguf_link(directory)
    source: TorchWeights | None = None
    if dummy:
        source = TorchDummyWeights(DummyWeights(config.seed), dtype, device)
    elif file is not None:
        log.warning("%s: %s: transformers' code computes it, with weights dequantised to %s", file, model.not_ours, dtype)
        source = open_torch_weights(config, directory, dtype, device)
    else:
        weight_files(directory)  # raises ModelNotFound for files in other formats
    longest = config.max_model_len or model.max_position_embeddings
    network = TransformersModel.load(model, directory, dtype, device, longest, source, norms=not dummy)
    if source is not None:
        source.weights.finish(model)
    weights = source or open_torch_weights(config, directory, dtype, device)
    network.scales = [kv_scales(weights, layer, spec.kv_heads) for layer, spec in enumerate(model.kv_specs)]
    check(network, dtype, device, model.vocab_size, model.architecture)
    return network
