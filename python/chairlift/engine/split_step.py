"""Retries steps that a device lacks memory for, in parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift.errors import OutOfMemory
from chairlift.runner.buffers import Sampled, StepBuffers, StepSizes

if TYPE_CHECKING:
    from chairlift.runner.interface import Runner

log = logging.getLogger("chairlift")

LIMIT_MICROSECONDS = 10_000_000
"""How long steps stay limited after an out-of-memory error: each failed attempt costs time, and other processes may free memory."""


class SplitStep:
    """Runs a step in parts if the device lacks memory for it, and remembers the largest part that fitted.

    A part is a range of a step's tokens, and for the runner it is a step. The parts together give the step's result, because a token
    only needs what tokens before it have written. A failed part is written again.
    """

    def __init__(self, runner: Runner, block_size: int) -> None:
        self._runner, self._block_size = runner, block_size
        self._max_tokens, self._limited_until = 0, 0
        self.steps = 0
        """Steps that failed for lack of memory when they were tried as a whole."""

    def fits(self, tokens: int, now: int) -> bool:
        """Whether to try a step of this many tokens as a whole. Times are microseconds."""
        return now >= self._limited_until or tokens <= self._max_tokens

    def out_of_memory(self, tokens: int, error: OutOfMemory, now: int) -> None:
        """Records that a step of this many tokens did not fit."""
        self.steps += 1
        self._max_tokens, self._limited_until = max(1, tokens // 2), now + LIMIT_MICROSECONDS
        log.warning(
            "out of memory in a step of %d tokens, which is split: %s; if this recurs, lower "
            "--gpu-memory-utilization or --max-num-batched-tokens",
            tokens,
            error,
        )

    def run(
        self,
        buffer_index: int,
        sizes: StepSizes,
        last_token: Callable[[int], int],
        re_add: Callable[[Iterable[int]], None],
        now: int,
    ) -> tuple[Sampled, list[int]]:
        """Runs the step in `buffers[buffer_index]` in parts. All earlier steps must be committed.

        `last_token` returns the last token of a slot, which the buffers do not contain. `re_add` adds slots to the runner again, after
        the sampler may have counted a token for them.

        Also returns the slots of failed sequences, whose samples are invalid: one token of theirs did not fit even after a retry, or
        they share blocks with such a sequence.
        """
        buffers = self._runner.buffers[buffer_index]
        self._runner.wait()  # the device may still read the buffers
        step = _StepArrays.copied(buffers, sizes, last_token)
        at, size, copies = 0, min(self._max_tokens, sizes.tokens), sizes.copies
        results, failed_slots, retried = list[Sampled](), set[int](), -1
        while at < sizes.tokens:
            size = min(size, sizes.tokens - at)
            part = StepSizes(size, *step.write(buffers, at, at + size), copies, sizes.table_writes)
            copies = 0  # copies need no memory, so they succeed
            try:
                results.append(self._run_part(buffer_index, part))
            except OutOfMemory as error:
                message = str(error)  # not the error, which keeps the part's tensors alive
            else:
                at, size = at + size, min(2 * size, self._max_tokens)
                continue
            self._runner.wait()
            re_add(step.slots_of(at, at + size))
            if size > 1:
                size = self._max_tokens = size // 2
                self._limited_until = now + LIMIT_MICROSECONDS
                continue
            if retried != at:
                retried = at  # `wait` has returned memory, which may suffice
                continue
            log.error("out of memory for one token of a request, which fails: %s", message)
            slots, after = step.without(at, buffers.block_tables, self._block_size)
            failed_slots |= slots
            results.append(_failed_samples(step.samples_between(at, after)))
            at, self._max_tokens = after, sizes.tokens  # the other sequences may fit
        return _concatenated(results), sorted(failed_slots)

    def _run_part(self, buffer_index: int, sizes: StepSizes) -> Sampled:
        launched: Any = self._runner.launch(buffer_index, sizes)
        self._runner.sample(launched)
        return self._runner.collect(launched)


@dataclass(frozen=True, slots=True)
class _StepArrays:
    """A copy of a step's arrays (see `StepBuffers`), from which the buffers are filled for each part."""

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    starts: np.ndarray
    batch_slots: np.ndarray
    sample_at: np.ndarray
    sample_slots: np.ndarray

    @classmethod
    def copied(cls, buffers: StepBuffers, sizes: StepSizes, last_token: Callable[[int], int]) -> _StepArrays:
        """Copies the arrays and fills in the input ids that the host did not know at the plan."""
        ids = buffers.input_ids[: sizes.tokens].copy()
        for at in np.flatnonzero(ids < 0):
            # The device's last token is wrong if the slot has sampled in a part that failed afterwards.
            ids[at] = last_token(-int(ids[at]) - 1)
        return cls(
            ids,
            buffers.positions[: sizes.tokens].copy(),
            buffers.slot_mapping[: sizes.tokens].copy(),
            buffers.query_starts[: sizes.seqs + 1].copy(),
            buffers.batch_slots[: sizes.seqs].copy(),
            buffers.sample_at[: sizes.samples].copy(),
            buffers.sample_slots[: sizes.samples].copy(),
        )

    def write(self, buffers: StepBuffers, first: int, after: int) -> tuple[int, int]:
        """Fills the buffers with the tokens `first` to `after` (exclusive). Returns their numbers of sequences and samples."""
        seqs, samples = self._seqs(first, after), slice(*np.searchsorted(self.sample_at, (first, after)))
        starts = np.clip(self.starts[seqs.start : seqs.stop + 1], first, after)
        count, sampled = len(starts) - 1, self.sample_at[samples]
        for name in ("input_ids", "positions", "slot_mapping"):
            getattr(buffers, name)[: after - first] = getattr(self, name)[first:after]
        buffers.query_starts[: count + 1] = starts - first
        buffers.context_lens[:count] = self.positions[starts[1:] - 1] + 1
        buffers.batch_slots[:count] = self.batch_slots[seqs]
        buffers.sample_at[: len(sampled)] = sampled - first
        buffers.sample_slots[: len(sampled)] = self.sample_slots[samples]
        return count, len(sampled)

    def slots_of(self, first: int, after: int) -> list[int]:
        """The batch slots of these tokens."""
        slots: list[int] = self.batch_slots[self._seqs(first, after)].tolist()
        return slots

    def samples_between(self, first: int, after: int) -> int:
        """The number of samples at these tokens."""
        return int(np.count_nonzero((first <= self.sample_at) & (self.sample_at < after)))

    def without(self, at: int, tables: np.ndarray, block_size: int) -> tuple[set[int], int]:
        """The batch slots whose results are wrong if the token at `at` and the rest of its chunk are skipped, and the end of that chunk."""
        after = int(self.starts[np.searchsorted(self.starts, at, "right")])
        missing = self.slot_mapping[at:after] // block_size
        used = self.positions[self.starts[1:] - 1] // block_size + 1
        slots = zip(self.batch_slots.tolist(), used.tolist(), strict=True)
        # Sequences that were admitted in this step may share blocks that this chunk would have filled.
        return {slot for slot, count in slots if np.isin(tables[slot, :count], missing).any()}, after

    def _seqs(self, first: int, after: int) -> slice:
        return slice(int(np.searchsorted(self.starts, first, "right")) - 1, int(np.searchsorted(self.starts, after)))


def _failed_samples(count: int) -> Sampled:
    return Sampled(np.full(count, -1, dtype=np.int32), np.zeros(0, dtype=np.float32), {}, [], {})


def _concatenated(parts: list[Sampled]) -> Sampled:
    """Concatenates the results of the parts of a step."""
    scored = any(part.logprobs.size for part in parts)
    details: dict[int, bytes] = {}
    refusals: dict[int, bytes] = {}
    before = 0
    for part in parts:
        details |= {before + at: line for at, line in part.details.items()}
        refusals |= {before + at: reason for at, reason in part.refusals.items()}
        before += len(part.tokens)
    return Sampled(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.logprobs if part.logprobs.size or not scored else np.zeros(len(part.tokens), "f4") for part in parts]),
        details,
        [line for part in parts for line in part.prompts],
        refusals,
    )
