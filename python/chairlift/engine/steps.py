"""The steps of an engine, from their plans to their commits."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift import _core
from chairlift.config import EngineConfig
from chairlift.engine import clock
from chairlift.engine.energy import EnergyAccount
from chairlift.engine.sequences import Sequences
from chairlift.engine.split_step import SplitStep
from chairlift.errors import InvalidRequest, OutOfMemory
from chairlift.runner.buffers import StepSizes
from chairlift.runner.interface import NewSequence
from chairlift.runner.sampling.sampler import entries_of
from chairlift.sampling import SamplingParams

if TYPE_CHECKING:
    from chairlift.runner.buffers import Sampled
    from chairlift.runner.interface import Runner

log = logging.getLogger("chairlift")


@dataclass(slots=True)
class Step:
    """A step from its plan to its commit."""

    buffer_index: int
    sizes: StepSizes
    tags: np.ndarray
    """Tags of the samples, u64. Slots may have new owners at the commit."""
    failed: Mapping[int, bytes | None]
    """The samples of sequences that cannot be sampled, each with its reason if that is an InvalidRequest."""
    launched: Any = None
    """The runner's handle; None if the device lacks memory for the whole step."""
    sampled: Sampled | None = None
    """The result of a split step."""


class Steps:
    """Plans, launches, samples, collects and commits the steps of an engine. Two may be in progress.

    Has the step buffers and knows the sequence of each batch slot. Times are microseconds.
    """

    def __init__(
        self, config: EngineConfig, scheduler: _core.Scheduler, runner: Runner, sequences: Sequences, energy: EnergyAccount
    ) -> None:
        self._scheduler, self._runner, self._sequences, self._energy = scheduler, runner, sequences, energy
        self._drafts_forced_tokens = config.speculative_method == "auto" and not runner.overlaps
        self._buffers = [_core.StepBuffers(**buffers.arrays()) for buffers in runner.buffers]
        self._next_buffer = 0
        self._plans: deque[_core.StepPlan] = deque()  # not yet committed, oldest first
        self._split_step = SplitStep(runner, config.block_size)
        self._slot_tags = np.zeros(runner.max_num_seqs, dtype=np.uint64)  # the last sequence of each batch slot
        self._failed_slots: dict[int, bytes | None] = {}  # their sequences cannot be sampled and end with an error, for this reason
        self.stage = "idle", time.monotonic()
        """The current part of a step (`plan`, `run` or `commit`) and its start. Not reset after a step."""

    def __len__(self) -> int:
        """The number of steps that are not committed."""
        return len(self._plans)

    @property
    def short_of_memory(self) -> int:
        """Number of steps that the device lacked memory for."""
        return self._split_step.steps

    def enter(self, stage: str) -> None:
        """Records that a part of a step begins."""
        self.stage = stage, time.monotonic()

    def launch(self, now: int, started: list[tuple[int, int, int, int]]) -> Step | None:
        """Plans a step and launches it; None if there is nothing to run. Adds admitted sequences to `started`."""
        self.enter("plan")
        plan = self._scheduler.plan(self._buffers[self._next_buffer], now, self._forced_tokens())
        if plan is None:
            return None
        self._plans.append(plan)
        self.enter("run")
        for slot, seq, tag, cached_tokens, own_cached_tokens, queued in plan.admitted:
            self._assign_slot(slot, seq, tag)
            started.append((tag, cached_tokens, own_cached_tokens, queued))
        self._runner.swap(plan.swap_out, plan.swap_in)
        sizes = StepSizes(
            plan.num_tokens,
            plan.num_seqs,
            plan.num_samples,
            plan.num_copies,
            plan.num_table_writes,
            plan.num_state_copies,
            plan.num_state_saves,
        )
        slots = self._runner.buffers[self._next_buffer].sample_slots[: sizes.samples]
        failed = dict(entries_of(self._failed_slots, slots))
        step = Step(self._next_buffer, sizes, self._slot_tags[slots], failed)
        self._next_buffer = (self._next_buffer + 1) % len(self._buffers)
        if self._split_step.fits(sizes.tokens, now):
            try:
                step.launched = self._runner.launch(step.buffer_index, sizes)
            except OutOfMemory as error:
                self._split_step.out_of_memory(sizes.tokens, error, now)
                step.sizes = sizes._replace(copies=0)  # the copies are done
        return step

    def _forced_tokens(self) -> list[tuple[int, Sequence[int]]]:
        """The running sequences whose grammar leaves no choice, each with its next tokens; none if they are not drafted."""
        if not self._drafts_forced_tokens:
            return []
        owners = [(self._sequences.get(int(self._slot_tags[slot])), tokens) for slot, tokens in self._runner.forced_tokens()]
        return [(request.seq, tokens) for request, tokens in owners if request is not None]

    def sample(self, step: Step, starved: list[_core.Timeline]) -> None:
        """Starts sampling a step, or splits it if the device lacks memory. All earlier steps must be committed.

        Adds the timelines of sequences that fail for lack of memory to `starved`.
        """
        self.enter("run")
        if step.launched is not None:
            try:
                return self._runner.sample(step.launched)
            except OutOfMemory as error:
                self._split_step.out_of_memory(step.sizes.tokens, error, clock.now())
            step.launched, step.sizes = None, step.sizes._replace(copies=0)
            self._re_add(self._runner.buffers[step.buffer_index].batch_slots[: step.sizes.seqs].tolist())
        step.sampled, failed_slots = self._split_step.run(step.buffer_index, step.sizes, self._last_token, self._re_add, clock.now())
        for slot in failed_slots:
            tag = int(self._slot_tags[slot])
            if (request := self._sequences.get(tag)) is not None and request.slot == slot:
                # Before the commit, so that the prefix cache does not keep blocks that were not computed.
                self._scheduler.fail(request.seq, clock.now())
                self.remove(tag)
                timeline = self._scheduler.explain(tag)
                assert timeline is not None  # it has just ended
                starved.append(timeline)

    def collect(self, step: Step) -> Sampled:
        """Waits for a step's tokens."""
        self.enter("run")
        sampled: Sampled = step.sampled or self._runner.collect(step.launched)
        for at, reason in step.failed.items():
            sampled.tokens[at] = -1
            if reason is not None:
                sampled.refusals[at] = reason
        return sampled

    def commit(self, sampled: Sampled) -> _core.Outputs:
        """Gives the tokens of the oldest step to the scheduler and removes the sequences that ended."""
        self.enter("commit")
        plan, now = self._plans.popleft(), clock.now()
        self._energy.read_before_commit(plan, sampled.tokens, now)
        outputs = self._scheduler.commit(plan, sampled.tokens, now)
        for timeline in outputs.ended:
            self.remove(timeline["tag"])
        return outputs

    def sequence_tags(self, step: Step) -> list[int]:
        """The tags of a step's sequences, in their order in the batch."""
        slots = self._runner.buffers[step.buffer_index].batch_slots[: step.sizes.seqs]
        tags: list[int] = self._slot_tags[slots].tolist()
        return tags

    def remove(self, tag: int) -> None:
        """Forgets a sequence that has ended and frees its slot."""
        self.free(tag, self._sequences.forget(tag).slot)

    def free(self, tag: int, slot: int | None) -> None:
        """Frees the last slot of a sequence that has ended, unless another sequence has it."""
        if slot is not None and self._slot_tags[slot] == tag:
            self._runner.remove_request(slot)

    def discard(self) -> None:
        """Commits all steps without tokens. Their sequences must have ended."""
        while self._plans:
            plan = self._plans.popleft()
            self._scheduler.commit(plan, np.full(plan.num_samples, -1, dtype=np.int32), clock.now())
        self._runner.wait()

    def _last_token(self, slot: int) -> int:
        """The token that a slot sampled last; 0 if its sequence has ended."""
        request = self._sequences.get(int(self._slot_tags[slot]))
        return 0 if request is None else int(np.frombuffer(self._scheduler.tokens(request.seq)[0], dtype=np.int32)[-1])

    def _re_add(self, slots: Iterable[int]) -> None:
        """Adds the live sequences of these slots to the runner again, which resets their sampling state."""
        for slot in slots:
            tag = int(self._slot_tags[slot])
            if (request := self._sequences.get(tag)) is not None and request.slot == slot:
                self._assign_slot(slot, request.seq, tag)

    def _assign_slot(self, slot: int, seq: int, tag: int) -> None:
        """Adds a sequence to the runner. If its sampling parameters fail there, only this sequence ends."""
        tokens, prompt_len = self._scheduler.tokens(seq)
        request, ids = self._sequences.get(tag), np.frombuffer(tokens, dtype=np.int32)
        assert request is not None  # the step has its tokens
        if request.slot is not None and request.slot != slot and self._slot_tags[request.slot] == tag:
            self._runner.remove_request(request.slot)  # it was preempted, and its slot has had no other sequence since
        request.slot, self._slot_tags[slot] = slot, tag
        self._failed_slots.pop(slot, None)
        # A sequence that cannot be sampled is computed all the same: others may read its KV, or share its prompt's log-probabilities.
        adapter = 0 if request.adapter is None else request.adapter.number
        sequence = NewSequence(SamplingParams(temperature=0.0), ids, prompt_len, 0, prompt=request.prompt, adapter=adapter)
        try:
            matcher, ends = request.new_matcher(), self._sequences.end_tokens(request.params)
            whole = replace(sequence, params=request.params, seed=request.seed, ends=ends, matcher=matcher)
            self._runner.add_request(slot, whole)
        except Exception as error:
            if isinstance(error, InvalidRequest):
                self._failed_slots[slot] = error.packed()
            else:
                log.exception("sequence %d cannot be sampled and ends with an error", tag)
                self._failed_slots[slot] = None
            self._runner.add_request(slot, sequence)  # replaces a half-assigned slot


def logprobs_of(sampled: Sampled, sample_tags: np.ndarray, output_tags: bytes) -> tuple[bytes, dict[int, bytes]]:
    """The log-probabilities and details of the output tokens, in order, selected from those of all samples.

    A tag has one sample, or several in a row where tokens were drafted. Sequences that ended since the plan have no output.
    """
    if not sampled.logprobs.size and not sampled.details:
        return b"", {}  # no request needs any
    if len(output_tags) == sample_tags.nbytes:
        return sampled.logprobs.tobytes(), {int(sample_tags[at]): line for at, line in sampled.details.items()}
    has_output = accepted_samples(sample_tags, np.frombuffer(output_tags, dtype=np.uint64))
    details = {int(sample_tags[at]): line for at, line in sampled.details.items() if has_output[at]}
    return (sampled.logprobs[has_output].tobytes() if sampled.logprobs.size else b""), details


def accepted_samples(sample_tags: np.ndarray, output_tags: np.ndarray) -> np.ndarray:
    """Marks the samples that became output tokens, bool [samples]: the first samples of each tag, one per output token."""
    at = np.arange(len(sample_tags))
    begins = np.append(True, sample_tags[1:] != sample_tags[:-1])
    tags, counts = np.unique(output_tags, return_counts=True)
    index = np.minimum(np.searchsorted(tags, sample_tags), max(0, len(tags) - 1))
    count = np.where(tags[index] == sample_tags, counts[index], 0) if len(tags) else np.zeros(len(sample_tags), dtype=np.int64)
    accepted: np.ndarray = at - np.maximum.accumulate(np.where(begins, at, 0)) < count
    return accepted
