"""The executor on a CPU: the Rust kernels of `chairlift._core`."""

from __future__ import annotations

import numpy as np

from chairlift import _core
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.runner.buffers import Pairs, StepBuffers
from chairlift.runner.cpu_adapters import CpuAdapters
from chairlift.runner.cpu_decoder import build_decoder
from chairlift.runner.executor import ModelExecutor
from chairlift.runner.memory.precision import Precision
from chairlift.runner.weights import Weights


class CpuExecutor(ModelExecutor):
    """A model in Rust. The forward pass is one call without the GIL."""

    batch_invariant = True

    adapters: CpuAdapters
    cache: _core.KvCache
    """Set by `allocate`."""
    recurrent_states: _core.StateCache | None = None
    """The recurrent states. Set by `allocate_states`."""

    def __init__(self, config: ModelConfig, decoder: _core.Decoder, kv: str, isa: str) -> None:
        self.config, self.decoder, self.kv = config, decoder, kv
        self.adapters = CpuAdapters(decoder, config, isa)
        self._logits = np.empty((1, config.head_size), dtype=np.float32)

    @classmethod
    def load(cls, config: EngineConfig, weights: Weights, model: ModelConfig, precision: Precision) -> CpuExecutor:
        """Packs the weights. The settings are complete. Raises UnsupportedModel."""
        longest = config.max_model_len or model.max_position_embeddings
        decoder = build_decoder(model, weights, precision.packed, config.threads or 1, config.cpu_isa, longest)
        weights.finish(model)
        return cls(model, decoder, precision.kv, config.cpu_isa)

    def allocate(self, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Allocates the KV cache."""
        model = self.config
        try:
            self.cache = _core.KvCache(
                parts=[(layers, *heads, model.latent.rank if model.latent else None) for heads, layers in model.kv_parts.items()],
                blocks=num_blocks,
                block_size=block_size,
                dtype=self.kv,
                host_blocks=host_blocks,
            )
        except MemoryError as error:
            raise InvalidSetting(f"{error}: lower --kv-cache-memory-bytes, --num-kv-blocks or --swap-space") from None

    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks within the cache."""
        self.cache.copy([(source, target) for source, target in pairs.tolist()])

    def allocate_states(self, slots: int) -> None:
        """Allocates slots for recurrent states."""
        try:
            self.recurrent_states = self.decoder.allocate_states(slots)
        except MemoryError as error:
            raise InvalidSetting(f"{error}: lower --max-num-seqs or --kv-cache-memory-bytes") from None

    def copy_states(self, pairs: np.ndarray) -> None:
        """Copies recurrent states between slots."""
        assert self.recurrent_states is not None
        self.recurrent_states.copy([(source, target) for source, target in pairs.tolist()])

    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host, then back."""
        self.cache.swap(list(outs), list(ins))

    @property
    def progress(self) -> int:
        """A number that changes while the kernels compute."""
        return self.decoder.progress

    @property
    def kv_blocks(self) -> _core.KvCache:
        """The KV cache."""
        return self.cache

    @property
    def state_storage(self) -> _core.StateCache | None:
        """The recurrent states of a model that has them."""
        return self.recurrent_states

    def forward(self, buffers: StepBuffers, num_tokens: int, num_seqs: int) -> None:
        """Runs the step in the buffers."""
        states = self.recurrent_states
        self.decoder.forward(
            self.cache,
            input_ids=buffers.input_ids[:num_tokens],
            positions=buffers.positions[:num_tokens],
            slot_mapping=buffers.slot_mapping[:num_tokens],
            query_starts=buffers.query_starts[: num_seqs + 1],
            context_lens=buffers.context_lens[:num_seqs],
            batch_slots=buffers.batch_slots[:num_seqs],
            block_tables=buffers.block_tables,
            adapters=self.adapters.by_slot(len(buffers.block_tables)),
            states=states,
            state_slots=None if states is None else buffers.state_slots[:num_seqs],
            state_saves=None if states is None else buffers.state_saves[: 3 * buffers.num_state_saves],
        )

    def logits(self, at: np.ndarray) -> np.ndarray:
        """Logits of the last step at token positions `at`."""
        if len(self._logits) < len(at):
            self._logits = np.empty((len(at), self.config.head_size), dtype=np.float32)
        self.decoder.logits(at.astype(np.int32, copy=False), self._logits)
        return self._logits[: len(at)]

    def states(self, at: np.ndarray) -> np.ndarray:
        """Hidden states of the last step at token positions `at` (see `ModelExecutor.states`).

        A classifier returns the logits of its scores instead.
        """
        if self.config.classifier:
            numbers = np.empty((len(at), self.config.head_size), dtype=np.float32)
            self.decoder.logits(at.astype(np.int32, copy=False), numbers)
            return numbers[:, :1] - numbers[:, 1:] if numbers.shape[1] == 2 else numbers
        out = np.empty((len(at), self.config.hidden_size), dtype=np.float32)
        self.decoder.states(at.astype(np.int32, copy=False), out)
        return out
