"""A runner without a model: it returns tokens at once and needs no torch. For tests of servers, clients and schedulers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chairlift.config import EngineConfig
from chairlift.models.config import load_shape
from chairlift.runner.buffers import Layout, Sampled, StepBuffers, StepSizes
from chairlift.runner.interface import NewSequence, Runner
from chairlift.runner.memory.decision import Decision, asked

DEFAULT_BLOCKS = 1 << 20
"""Most KV blocks by default. They take no memory, but each costs the scheduler some."""


class NullRunner(Runner):
    """A runner whose next token is a function of the previous token and its position.

    Output never ends by itself, sampling parameters have no effect, and there are no log-probabilities. The context length and the
    vocabulary are those of the model's config.
    """

    batch_invariant = True
    decisions = (Decision("weights", "none", asked("--load-format")),)

    def __init__(self, config: EngineConfig, directory: Path, ends: frozenset[int]) -> None:
        """Reads the model's config; `ends` are tokens that are never returned. Raises ModelNotFound or UnsupportedModel."""
        self.model_config = load_shape(directory)
        config = config.for_positions(self.model_config.max_position_embeddings)
        self.max_model_len = config.max_model_len or self.model_config.max_position_embeddings
        if config.num_kv_blocks is not None:
            self.max_model_len = min(self.max_model_len, config.num_kv_blocks * config.block_size)
        each = -(-self.max_model_len // config.block_size)
        self.max_num_seqs, self.max_num_batched_tokens = config.slots, config.step_tokens
        self.num_kv_blocks = 1 + (config.num_kv_blocks or min(config.slots * each, DEFAULT_BLOCKS))
        self.buffers = [StepBuffers(Layout(config.step_tokens, config.slots, each))]
        self._tokens = np.array([token for token in range(self.model_config.vocab_size) if token not in ends], dtype=np.int32)

    def add_request(self, slot: int, sequence: NewSequence) -> None:
        """Does nothing."""

    def launch(self, buffer_index: int, sizes: StepSizes) -> np.ndarray:
        """Computes the step's tokens: int32 [samples]."""
        buffers = self.buffers[buffer_index]
        at = buffers.sample_at[: sizes.samples]
        mixed = buffers.input_ids[at].astype(np.int64) * 31 + buffers.positions[at] * 17 + 7
        chosen: np.ndarray = self._tokens[mixed % len(self._tokens)]
        return chosen

    def collect(self, step: np.ndarray) -> Sampled:
        """Returns the tokens that `launch` computed."""
        return Sampled(step, np.zeros(0, dtype=np.float32), {}, [], {})
