"""Steps that a device has too little memory for, run in pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from chairlift.errors import OutOfMemory
from chairlift.runner.buffers import Sampled, StepBuffers

if TYPE_CHECKING:
    from chairlift.runner.null_executor import NullExecutor
    from chairlift.runner.runner import ModelRunner

log = logging.getLogger("chairlift")

SHORT_FOR = 10_000_000
"""Microseconds for which nothing larger is tried than what fitted: it costs time to find out, and others may give memory back."""


class Sizes(NamedTuple):
    """How much a step takes of its buffers."""

    tokens: int
    seqs: int
    samples: int
    copies: int
    table_writes: int


class SplitStep:
    """Runs steps in pieces where a device has too little memory for them, and remembers how large pieces may be.

    A piece is some consecutive tokens of a step, and to the runner a step like any other. One after the other they give what the step
    would have: a token needs only what tokens before it have written, in this step or an earlier one. What a piece wrote that failed
    is written again.
    """

    def __init__(self, runner: ModelRunner | NullExecutor, block_size: int) -> None:
        self._runner, self._block_size = runner, block_size
        self._most, self._until = 0, 0  # tokens of a piece, and for how long
        self.steps = 0
        """Steps that there was too little memory for when they were tried."""

    def fits(self, tokens: int, now: int) -> bool:
        """Whether a step of so many tokens is worth trying as a whole; `now` is in microseconds, here as everywhere."""
        return now >= self._until or tokens <= self._most

    def short(self, tokens: int, error: OutOfMemory, now: int) -> None:
        """Notes that there was too little memory for a step of so many tokens."""
        self.steps += 1
        self._most, self._until = max(1, tokens // 2), now + SHORT_FOR
        log.warning(
            "too little memory for a step of %d tokens, which runs in pieces: %s; if this comes often, lower "
            "--gpu-memory-utilization or --max-num-batched-tokens",
            tokens,
            error,
        )

    def run(
        self, turn: int, sizes: Sizes, token: Callable[[int], int], seat: Callable[[Iterable[int]], None], now: int
    ) -> tuple[Sampled, list[int]]:
        """Runs the step that `buffers[turn]` of the runner describe, with all those before it committed: what it gave.

        `token` gives the last token of a row, which the buffers do not know; `seat` has rows take their seats again, when the sampler may
        have counted a token for them. Also returns the rows of the sequences that are lost, whose samples are no good: one token of
        theirs was too much twice, or they share blocks with such a one.
        """
        buffers = self._runner.buffers[turn]
        self._runner.wait()  # it may have been reading them
        step = _Step.copied(buffers, sizes, token)
        at, size, copies = 0, min(self._most, sizes.tokens), sizes.copies
        given, lost, tried = list[Sampled](), set[int](), -1
        while at < sizes.tokens:
            size = min(size, sizes.tokens - at)
            shape = Sizes(size, *step.write(buffers, at, at + size), copies, sizes.table_writes)
            copies = 0  # they take no memory, and so are made
            try:
                given.append(self._piece(turn, shape))
            except OutOfMemory as error:
                why = str(error)  # and no more of it: the error holds what the piece had in memory
            else:
                at, size = at + size, min(2 * size, self._most)
                continue
            self._runner.wait()
            seat(step.rows_of(at, at + size))
            if size > 1:
                size = self._most = size // 2
                self._until = now + SHORT_FOR
                continue
            if tried != at:
                tried = at  # what was given back may suffice
                continue
            log.error("too little memory for one token of a request, which fails: %s", why)
            rows, after = step.without(at, buffers.block_tables, self._block_size)
            lost |= rows
            given.append(_nothing(step.samples_between(at, after)))
            at, self._most = after, sizes.tokens  # nothing is known of the others
        return _joined(given), sorted(lost)

    def _piece(self, turn: int, sizes: Sizes) -> Sampled:
        launched: Any = self._runner.launch(turn, *sizes)
        self._runner.sample(launched)
        return self._runner.collect(launched)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's arrays (see `StepBuffers`), as long as the step is, from which its buffers are filled for each piece."""

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    starts: np.ndarray
    batch_slots: np.ndarray
    sample_at: np.ndarray
    sample_slots: np.ndarray

    @classmethod
    def copied(cls, buffers: StepBuffers, sizes: Sizes, token: Callable[[int], int]) -> _Step:
        """Takes the arrays from the buffers, with the tokens that those do not know."""
        ids = buffers.input_ids[: sizes.tokens].copy()
        for at in np.flatnonzero(ids < 0):
            # The device does not know it either once the row has sampled again, in a piece that failed afterwards.
            ids[at] = token(-int(ids[at]) - 1)
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
        """Fills the buffers with the tokens from `first` to before `after` alone: how many sequences and samples that are."""
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

    def rows_of(self, first: int, after: int) -> list[int]:
        """The rows whose tokens these are."""
        rows: list[int] = self.batch_slots[self._seqs(first, after)].tolist()
        return rows

    def samples_between(self, first: int, after: int) -> int:
        """How many samples are asked for at these tokens."""
        return int(np.count_nonzero((first <= self.sample_at) & (self.sample_at < after)))

    def without(self, at: int, tables: np.ndarray, block_size: int) -> tuple[set[int], int]:
        """The rows that have no use of the step without the token at `at` and the rest of its chunk, and where that ends."""
        after = int(self.starts[np.searchsorted(self.starts, at, "right")])
        missing = self.slot_mapping[at:after] // block_size
        used = self.positions[self.starts[1:] - 1] // block_size + 1
        rows = zip(self.batch_slots.tolist(), used.tolist(), strict=True)
        # A block that this chunk would have filled may be shared already, by sequences that were admitted in this very step.
        return {row for row, count in rows if np.isin(tables[row, :count], missing).any()}, after

    def _seqs(self, first: int, after: int) -> slice:
        return slice(int(np.searchsorted(self.starts, first, "right")) - 1, int(np.searchsorted(self.starts, after)))


def _nothing(count: int) -> Sampled:
    return Sampled(np.full(count, -1, dtype=np.int32), np.zeros(0, dtype=np.float32), {}, [])


def _joined(parts: list[Sampled]) -> Sampled:
    """The samples of a step's pieces as those of the step."""
    scored = any(part.logprobs.size for part in parts)
    details: dict[int, bytes] = {}
    before = 0
    for part in parts:
        details |= {before + at: line for at, line in part.details.items()}
        before += len(part.tokens)
    return Sampled(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.logprobs if part.logprobs.size or not scored else np.zeros(len(part.tokens), "f4") for part in parts]),
        details,
        [line for part in parts for line in part.prompts],
    )
