"""No model at all: tokens at once and without torch, for tests of servers, clients and schedulers at full speed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from chairlift.config import EngineConfig
from chairlift.models.config import load_shape
from chairlift.runner.buffers import Layout, Sampled, StepBuffers
from chairlift.runner.memory.decision import Decision, asked
from chairlift.sampling import SamplingParams

SEATED_BLOCKS = 1 << 20
"""KV blocks for the default: no memory stands behind them, but each costs the scheduler some."""


class NullExecutor:
    """What an engine needs of `ModelRunner`, with a token that follows from the one before and its position alone.

    Answers never end by themselves, sampling settings have no effect, and there are no log-probabilities. The context length and the
    vocabulary are those of the model's config.
    """

    batch_invariant = True
    overlaps = False
    decisions = (Decision("weights", "none", asked("--load-format")),)
    host_blocks = 0
    swap_ns_per_block = 0

    def __init__(self, config: EngineConfig, directory: Path, ends: frozenset[int]) -> None:
        """Reads the model's config; raises ModelNotFound or UnsupportedModel for a directory without a usable one.

        `ends` are the tokens that it never gives.
        """
        self.model_config = load_shape(directory)
        self.max_model_len = config.max_model_len or self.model_config.max_position_embeddings
        if config.num_kv_blocks is not None:
            self.max_model_len = min(self.max_model_len, config.num_kv_blocks * config.block_size)
        each = -(-self.max_model_len // config.block_size)
        self.max_num_seqs, self.max_num_batched_tokens = config.seats, config.step_tokens
        self.num_kv_blocks = 1 + (config.num_kv_blocks or min(config.seats * each, SEATED_BLOCKS))
        self.buffers = [StepBuffers(Layout(config.step_tokens, config.seats, each))]
        self._tokens = np.array([token for token in range(self.model_config.vocab_size) if token not in ends], dtype=np.int32)

    def seat(self, row: int, params: SamplingParams, tokens: np.ndarray, prompt_len: int, seed: int, **rest: object) -> None:
        """A sequence takes a row, which changes nothing."""

    def swap(self, outs: Iterable[tuple[int, int]], ins: Iterable[tuple[int, int]]) -> None:
        """Nothing is ever swapped, since there are no host blocks."""

    def leave(self, row: int) -> None:
        """A sequence is at its end, which changes nothing."""

    def launch(self, turn: int, num_tokens: int, num_seqs: int, num_samples: int, num_copies: int, num_table_writes: int) -> np.ndarray:
        """The tokens of the step that the buffers describe: int32 [num_samples]."""
        buffers = self.buffers[turn]
        at = buffers.sample_at[:num_samples]
        mixed = buffers.input_ids[at].astype(np.int64) * 31 + buffers.positions[at] * 17 + 7
        chosen: np.ndarray = self._tokens[mixed % len(self._tokens)]
        return chosen

    def sample(self, step: np.ndarray) -> None:
        """Does nothing: `launch` has done it."""

    def collect(self, step: np.ndarray) -> Sampled:
        """What `launch` gave."""
        return Sampled(step, np.zeros(0, dtype=np.float32), {}, [])

    def wait(self) -> None:
        """Does not wait: nothing is ever under way."""

    def close(self) -> None:
        """Has nothing to end."""
