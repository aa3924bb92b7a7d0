"""The Rust scheduler, as Python sees it; times are microseconds on one clock of the caller's."""

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EmptyPrompt",
    "NeverFits",
    "NoNewTokens",
    "Outputs",
    "Rejected",
    "Scheduler",
    "Stats",
    "StepBuffers",
    "StepPlan",
    "TooLong",
    "__version__",
]

__version__: str

class Rejected(ValueError):
    """A request that can never run."""

class EmptyPrompt(Rejected):
    """The prompt has no tokens."""

class NoNewTokens(Rejected):
    """No new token was asked for."""

class TooLong(Rejected):
    """Prompt and output exceed the model's context."""

class NeverFits(Rejected):
    """Prompt and output exceed the whole KV cache."""

@final
class StepBuffers:
    """The arrays of one step, shared with the model runner: writable, C-contiguous int32."""

    def __new__(
        cls,
        *,
        input_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int32],
        query_starts: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        rows: NDArray[np.int32],
        sample_at: NDArray[np.int32],
        sample_rows: NDArray[np.int32],
        copies: NDArray[np.int32],
        block_tables: NDArray[np.int32],
    ) -> StepBuffers: ...

@final
class StepPlan:
    """A planned step, spent by `Scheduler.commit`."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_copies(self) -> int: ...
    @property
    def seated(self) -> list[tuple[int, int, int, int, int]]:
        """One a sequence admitted in this step: row, sequence, tag, cached prompt tokens, microseconds it had queued."""
    @property
    def preempted(self) -> list[int]:
        """Tags of the sequences that lost their blocks to make room."""

@final
class Outputs:
    """What a step gave: packed little-endian arrays of equal length, one entry a token."""

    @property
    def tags(self) -> bytes:
        """uint64: whose token."""
    @property
    def tokens(self) -> bytes:
        """int32: the token."""
    @property
    def finishes(self) -> bytes:
        """uint8: 0 goes on, 1 stop, 2 length, 3 error (the entry's token is none)."""
    @property
    def ended(self) -> list[tuple[int, int, int, int, int, int]]:
        """One a request that finished: tag, preemptions, and when it arrived, started, gave its first token, ended."""

@final
class Stats:
    """Counters since the start, and what is true now."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...
    @property
    def prefix_hits(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def preemptions(self) -> int: ...

@final
class Scheduler:
    """Chooses each step's tokens and the KV blocks they live in."""

    def __new__(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_seqs: int,
        max_model_len: int,
        prefix_caching: bool = True,
        watermark: int = 0,
    ) -> Scheduler: ...
    def add(self, tag: int, prompt: NDArray[np.int32], max_new_tokens: int, stop: Sequence[int], now: int, *, salt: bytes = ...) -> int:
        """Queues a request and returns its sequence's handle; raises a `Rejected` if it can never run."""
    def abort(self, seq: int, now: int) -> bool:
        """Ends a request in whatever state it is; False if it has ended already."""
    def plan(self, buffers: StepBuffers, now: int) -> StepPlan | None:
        """Chooses the next step and fills the buffers; None when there is nothing to run."""
    def commit(self, plan: StepPlan, sampled: NDArray[np.int32], now: int) -> Outputs:
        """Takes in the sampled tokens (int32, one a sampled position, negative: none), plans in order."""
    def tokens(self, seq: int) -> tuple[bytes, int]:
        """A sequence's tokens so far (int32) and how many are its prompt; KeyError if it has ended."""
    def stats(self) -> Stats:
        """Counters, and what is true now."""
    def check(self) -> None:
        """Panics unless every invariant holds."""
