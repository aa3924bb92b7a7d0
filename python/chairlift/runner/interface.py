"""The interface of a runner, which runs the steps that the engine plans."""

# ruff: noqa: B027 - these methods do nothing by default

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from chairlift import _core
    from chairlift.checkpoint.adapter import AdapterFiles
    from chairlift.models.shape import ModelShape
    from chairlift.runner.buffers import Pairs, Sampled, StepBuffers, StepSizes
    from chairlift.runner.memory.decision import Decision
    from chairlift.runner.sampling.logprobs import PromptLogprobs
    from chairlift.runner.sampling.matcher import Matcher
    from chairlift.sampling import SamplingParams


class AdapterStore(ABC):
    """The LoRA adapters of a loaded model, and which of them each batch slot has."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        """The adapters' numbers, of the slots that have one."""

    @abstractmethod
    def pack(self, files: AdapterFiles) -> Any:
        """Packs an adapter for `add`. Any thread may call it. Raises UnsupportedModel if it was made for another base."""

    @abstractmethod
    def add(self, packed: Any) -> int:
        """Loads a packed adapter and returns its number, from 1 on."""

    @abstractmethod
    def remove(self, number: int) -> None:
        """Frees the memory of an adapter that no sequence uses."""

    def assign(self, slot: int, number: int) -> None:
        """Sets the adapter of the sequence in a batch slot; 0 for none."""
        self.slots.pop(slot, None)
        if number:
            self.slots[slot] = number


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that gets a batch slot."""

    params: SamplingParams
    tokens: np.ndarray
    """Its tokens so far: prompt, then output."""
    prompt_len: int
    seed: int
    ends: Sequence[int] = ()
    """The token ids at which it stops."""
    matcher: Matcher | None = None
    """Its grammar, which has accepted nothing yet."""
    prompt: PromptLogprobs | None = None
    """Tracks the log-probabilities of its prompt."""
    adapter: int = 0
    """The number of its LoRA adapter, 0 without one."""


class Runner(ABC):
    """Runs the steps that the scheduler plans: `launch`, then `sample`, then `collect`.

    If `overlaps`, the device works asynchronously and `launch` and `sample` do not wait for it. The engine may then launch one step
    while the previous one runs, and samples it after it has collected the previous one, because grammars need the sampled tokens.
    The defaults are those of a runner that computes in `launch`, on the host, and keeps no KV.
    """

    model_config: ModelShape
    max_model_len: int
    """Most tokens of one sequence."""
    num_kv_blocks: int
    """KV blocks, including scratch block 0."""
    host_blocks: int = 0
    """KV blocks in host memory, for swapped-out sequences."""
    kv_cache_bytes: int = 0
    """Bytes of all KV blocks on the device."""
    long_texts_bytes: int = 0
    """Most bytes of texts that are computed in parts."""
    swap_ns_per_block: int = 0
    """Nanoseconds to copy one block to the host or back."""
    state_slots: int = 0
    """Slots for the recurrent states of sequences, at least `max_num_seqs`; 0 for a model without recurrent layers."""
    max_num_seqs: int
    max_num_batched_tokens: int
    overlaps: bool = False
    batch_invariant: bool
    """Whether a sequence's logits are bitwise equal whatever else is in the batch."""
    has_logprobs: bool = False
    generates: bool = True
    """Whether it generates tokens."""
    adapters: AdapterStore | None = None
    """The LoRA adapters; None if sequences cannot have any."""
    pooling: str | None = None
    """How it combines the states of a text to its embedding: first, last or mean; None if it computes no embeddings."""
    decisions: tuple[Decision, ...] = ()
    """The decisions made at start-up and their reasons."""
    buffers: list[StepBuffers]
    """One per step that may be in flight; the scheduler fills them in turn."""

    @property
    def kv_blocks(self) -> _core.KvCache | None:
        """The KV cache; None if its blocks cannot be read."""
        return None

    @property
    def progress(self) -> int:
        """A number that changes while a step computes, also within `launch`; always 0 if the runner does not know."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states."""
        return self.state_slots * self.model_config.state_bytes

    @property
    def state_storage(self) -> _core.StateCache | None:
        """The recurrent states of a model that has them; None if they cannot be read."""
        return None

    @abstractmethod
    def add_request(self, slot: int, sequence: NewSequence) -> None:
        """Assigns a batch slot to a sequence."""

    def remove_request(self, slot: int) -> None:
        """Frees a slot whose sequence has ended. A step in flight may still contain it."""

    def forced_tokens(self) -> Sequence[tuple[int, Sequence[int]]]:
        """The slots whose grammar leaves no choice, each with the tokens that must come next. No step may be in flight."""
        return ()

    def swap(self, outs: Pairs, ins: Pairs) -> None:
        """Copies blocks to the host (device block, host block), then back (host block, device block)."""

    @abstractmethod
    def launch(self, buffer_index: int, sizes: StepSizes) -> Any:
        """Starts the forward pass of the step in `buffers[buffer_index]` and returns a handle for `sample` and `collect`.

        Raises OutOfMemory if the device lacks memory. The caller may launch the step again, without its block copies.
        """

    def sample(self, step: Any) -> None:
        """Starts sampling a launched step. The previous step must have been collected.

        Raises OutOfMemory if the device lacks memory. The caller must then re-add the step's requests and launch it again, because
        some slots may have counted a token.
        """

    @abstractmethod
    def collect(self, step: Any) -> Sampled:
        """Waits for the oldest step in flight and returns its tokens. Its buffers may be refilled."""

    def wait(self) -> None:
        """Waits until the device is idle and returns memory that torch holds in reserve. Steps in flight are discarded."""

    def close(self) -> None:
        """Ends the processes that compute parts of the model. Nothing may be called afterwards."""
