"""The engine's loop: intake, plan, run, commit, emit; on one thread, though a device may run one step while the next is planned."""

from __future__ import annotations

import itertools
import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift import _core
from chairlift.checkpoint.generation_config import recommended_sampling
from chairlift.checkpoint.locate import locate
from chairlift.config import EngineConfig
from chairlift.engine import scheduler_settings
from chairlift.engine.journal import Journal
from chairlift.engine.split_step import Sizes, SplitStep
from chairlift.errors import InvalidRequest, OutOfMemory, QueueFull
from chairlift.grammar.grammars import Grammar, Grammars
from chairlift.grammar.trial import Vocabulary
from chairlift.runner.null_executor import NullExecutor
from chairlift.runner.sampling.prompt_logprobs import PromptLogprobs
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.tokenizer import eos_token_ids, tokenizer_file

if TYPE_CHECKING:
    from chairlift.runner.buffers import Sampled
    from chairlift.runner.runner import ModelRunner
    from chairlift.runner.sampling.matcher import Matcher


log = logging.getLogger("chairlift")


MOST_WAITING, MOST_CELLS = 64, 4096
"""Waiting sequences, and cells of the map of KV blocks, that a look shows."""


@dataclass(slots=True)
class _RequestState:
    """What the engine keeps of a sequence while the core has it."""

    seq: int
    params: SamplingParams
    seed: int
    prompt: PromptLogprobs | None = None
    """Shared by the sequences of a request; None if the prompt's log-probabilities were not asked for."""
    matcher: Callable[[], Matcher] | None = None
    """Makes a matcher at the beginning of the answer, for each row that the sequence takes; None if its form is free."""
    row: int | None = None
    """The row that it has, or had last."""


@dataclass(slots=True)
class _Flight:
    """A step from its plan until its tokens are committed."""

    turn: int
    sizes: Sizes
    tags: np.ndarray
    """Whose samples they are, u64: by the commit some of them may have left, and others may have their rows."""
    failed: np.ndarray | None
    """Which samples are of sequences that cannot be sampled."""
    step: Any = None
    """What the runner knows it by; None if there was too little memory, or will be."""
    sampled: Sampled | None = None
    """What it gave, if it ran in pieces."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step gave: packed arrays, one entry a token, and who started and ended in it (see `protocol.Step`)."""

    tags: bytes = b""
    tokens: bytes = b""
    finishes: bytes = b""
    logprobs: bytes = b""
    started: Sequence[Sequence[int]] = ()
    ended: Sequence[Mapping[str, Any]] = ()
    details: Mapping[int, bytes] = field(default_factory=dict)
    prompts: Sequence[tuple[int, bytes]] = ()
    starved: Sequence[int] = ()


class Engine:
    """A model, its KV cache and the scheduler that shares them among requests.

    `add` and `abort` at any time between steps; `step` while `has_work`. Not thread-safe: one thread owns it.
    `on_phase(name, seconds)` is called after each phase of the start.
    """

    def __init__(self, config: EngineConfig, on_phase: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        self.config = config
        self._journal = None if config.journal is None else Journal(config.journal)
        directory = locate(config.model, config.revision, config.cache_dir)
        eos = eos_token_ids(directory, config.tokenizer)
        sampling = recommended_sampling(directory) if config.generation_config == "auto" else {}
        self._runner = _runner(config, directory, eos, on_phase)
        runner = self._runner
        settings = scheduler_settings.of_config(
            config,
            num_kv_blocks=runner.num_kv_blocks,
            block_size=config.block_size,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            max_num_seqs=runner.max_num_seqs,
            max_model_len=runner.max_model_len,
            host_blocks=runner.host_blocks,
            swap_ns_per_block=runner.swap_ns_per_block,
        )
        self._scheduler = _core.Scheduler(**settings, journal=config.journal is not None, hash_key=secrets.randbits(128))
        self._buffers = [_core.StepBuffers(**buffers.arrays()) for buffers in runner.buffers]
        self._turn = 0  # which of the buffers the next step goes through
        self._plans: deque[_core.StepPlan] = deque()  # those that are not committed, the oldest first
        self._flight: _Flight | None = None
        self._pieces = SplitStep(runner, config.block_size)
        self._live: dict[int, _RequestState] = {}
        self._tags = np.zeros(runner.max_num_seqs, dtype=np.uint64)  # who had each row last
        self._own_salts = itertools.count()
        self._failed_rows: set[int] = set()  # their sequences cannot be sampled, and end with an error when they should be
        self.stage = "idle", time.monotonic()
        """Which part of a step is under way, `plan`, `run` or `commit`, and since when; left as it is after the step."""
        self._eos = sorted(eos)
        vocab_size = runner.model_config.vocab_size
        ends = tuple(token for token in self._eos if token < vocab_size)
        self._grammars = Grammars(Vocabulary(tokenizer_file(directory, config.tokenizer), vocab_size, ends))
        self.facts: dict[str, object] = {
            "model": config.model,
            "max_model_len": runner.max_model_len,
            "num_kv_blocks": runner.num_kv_blocks - 1,
            "block_size": config.block_size,
            "max_num_seqs": runner.max_num_seqs,
            "max_num_batched_tokens": runner.max_num_batched_tokens,
            "determinism": "batch-invariant" if runner.batch_invariant else "best-effort",
            "decisions": [list(decision) for decision in (*runner.decisions, _sampling_decision(config, sampling))],
            "default_sampling": sampling,
            "vocab_size": vocab_size,
            "eos_token_ids": self._eos,
        }

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or any step."""
        return bool(self._live or self._plans)

    def compile(self, params: SamplingParams) -> Future[Grammar] | None:
        """The grammar that a request needs, as soon as another thread has compiled it; None if it needs none. Raises QueueFull."""
        return None if params.structured_output is None else self._grammars.compile(params.structured_output)

    def add(
        self,
        tag: int,
        prompt: Sequence[int] | np.ndarray,
        params: SamplingParams,
        scheduling: Scheduling | None = None,
        submitted: int | None = None,
        grammar: Future[Grammar] | None = None,
        spent: Mapping[str, int] | None = None,
    ) -> None:
        """Queues a request, whose sequences take `tag` and the numbers after it, all unique among unfinished ones.

        `submitted`, in microseconds of the monotonic clock, is when it came into the queue, if not just now. `spent` has the states that
        it was in before, with their microseconds: its timeline and its deadlines begin that much earlier.
        `grammar` is what `compile` gave; one that is not there yet is waited for. Raises InvalidRequest if the request can never run, and
        QueueFull if it can't wait; then none of its sequences is left.
        """
        scheduling = scheduling or Scheduling()
        tags = range(tag, tag + params.num_sequences)
        if not self._live.keys().isdisjoint(tags):
            raise InvalidRequest(f"request {tag} is already running", param="request_id")
        tokens = np.ascontiguousarray(prompt, dtype=np.int32)
        vocab_size = self._runner.model_config.vocab_size
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
            raise InvalidRequest(f"token ids must be from 0 to {vocab_size - 1}", param="prompt")
        if isinstance(self._runner, NullExecutor) and (params.logprobs is not None or params.prompt_logprobs is not None):
            raise InvalidRequest("without a model (--load-format none) there are no log-probabilities: leave them out", param="logprobs")
        now, spent = min(_now(), submitted or sys.maxsize), spent or {}
        told = None if params.prompt_logprobs is None else PromptLogprobs(tag, tokens, params.prompt_logprobs)
        bounds = self._grammar(params, grammar or self.compile(params))
        matcher = None if bounds is None else bounds.matcher
        try:
            first = self._first(tag, tokens, params, scheduling, now, now - sum(spent.values()))
            self._live[tag] = _RequestState(first, params, self._seed(tag, 0, params), told, matcher)
            for index, sibling in enumerate(tags[1:], 1):
                seq = self._scheduler.fork(self._live[tag].seq, sibling, now)
                self._live[sibling] = _RequestState(seq, params, self._seed(sibling, index, params), told, matcher)
            for one in tags:
                self._scheduler.prepared(self._live[one].seq, list(spent.items()))
        except BaseException as error:
            for added in tags:
                self.abort(added)
            raise _refusal(error) from None

    def abort(self, tag: int, *, stopped: bool = False) -> bool:
        """Ends a sequence without further output and frees what it holds; False if it has ended already.

        `stopped` says that its caller has what it wanted: it counts as stopped then, not as given up.
        """
        seat = self._live.pop(tag, None)
        if seat is None:
            return False
        found = (self._scheduler.stop if stopped else self._scheduler.abort)(seat.seq, _now())
        self._record()
        return found

    def step(self) -> StepReport | None:
        """Ends what has missed its deadline, and runs the model once over whatever the scheduler chose; None when there was neither.

        Where a device runs steps while the host goes on, the next step is planned and launched before the tokens of this one are
        waited for. A step that the device has too little memory for runs in pieces, when those before it are committed. What else the
        runner raises ends every request, and goes on to the caller; the engine can be used again.
        """
        self.stage = "plan", time.monotonic()
        now = _now()
        expired = self._scheduler.expire(now)
        for ledger in expired:
            del self._live[ledger["tag"]]
        started: list[tuple[int, int, int]] = []
        starved: list[Mapping[str, Any]] = []
        try:
            flight = self._flight or self._launch(now, started)
            if flight is None:
                self._record()
                return StepReport(ended=expired) if expired else None
            if self._flight is None:
                self._sample(flight, starved)
            self._flight = self._launch(now, started) if self._runner.overlaps else None
            self.stage = "run", time.monotonic()
            sampled = flight.sampled or self._runner.collect(flight.step)
            if flight.failed is not None:
                sampled.tokens[flight.failed] = -1
        except BaseException:
            self._abandon()
            raise
        self.stage = "commit", time.monotonic()
        outputs = self._scheduler.commit(self._plans.popleft(), sampled.tokens, _now())
        for ledger in outputs.ended:
            self._leave(ledger["tag"])
        if self._flight is not None:
            # Only now do grammars and biases know of the last tokens, and the runner who has ended: the device is at the pass meanwhile.
            self.stage = "run", time.monotonic()
            try:
                self._sample(self._flight, starved)
            except BaseException:
                self._abandon()
                raise
        self._record()
        logprobs, details = _told(sampled, flight.tags, outputs.tags)
        ended, lost = [*expired, *outputs.ended, *starved], [ledger["tag"] for ledger in starved]
        return StepReport(outputs.tags, outputs.tokens, outputs.finishes, logprobs, started, ended, details, sampled.prompts, lost)

    def wakes_in(self) -> float | None:
        """After a step that gave None: seconds until one may give something though nothing was added; None for never."""
        at = self._scheduler.wake_at()
        return None if at is None else max(0, at - _now()) / 1e6

    def explain(self, tag: int) -> dict[str, Any] | None:
        """The ledger of a sequence, so far or to its end; None for one that is not among the last that ended."""
        return self._scheduler.explain(tag)

    def look(self) -> dict[str, Any]:
        """Who has which row, who waits and why, who holds the blocks, and the steps since the last look, if that was not long ago."""
        return self._scheduler.snapshot(_now(), MOST_WAITING, MOST_CELLS) | {"now_us": _now()}

    def stats(self) -> dict[str, Any]:
        """The scheduler's counters since the start, and what is true now."""
        return self._scheduler.stats() | {"steps_short_of_memory": self._pieces.steps}

    def usage(self) -> dict[str, Any]:
        """The same for each of the `tenants` and `classes`."""
        return self._scheduler.usage()

    def check(self) -> None:
        """Panics unless every invariant of the scheduler holds; for tests."""
        self._scheduler.check()

    def close(self) -> None:
        """Writes out the rest of the journal, and ends other processes; open requests get nothing more."""
        self._grammars.close()
        self._runner.close()
        if self._journal is not None:
            self._record()
            self._journal.close()

    @staticmethod
    def _grammar(params: SamplingParams, compiling: Future[Grammar] | None) -> Grammar | None:
        """The compiled grammar; raises InvalidRequest with the field that asked for it."""
        if compiling is None or params.structured_output is None:
            return None
        try:
            return compiling.result()
        except InvalidRequest as error:
            param = params.structured_output.param
            raise InvalidRequest(f"{param} cannot be used: {error}", param=param, code=error.code) from None

    def _first(self, tag: int, tokens: np.ndarray, params: SamplingParams, scheduling: Scheduling, now: int, arrived: int) -> int:
        """Gives the core a request's first sequence, whose deadlines count from `arrived`."""
        max_tokens = params.max_tokens if params.max_tokens is not None else max(1, self._runner.max_model_len - tokens.size)

        def until(milliseconds: float | None) -> int | None:
            return None if milliseconds is None else arrived + _microseconds(milliseconds)

        return self._scheduler.add(
            tag,
            tokens,
            max_tokens,
            self._ends(params),
            now,
            salt=self._salt(params, scheduling),
            priority=scheduling.priority,
            tenant=scheduling.tenant,
            weight=(self.config.tenant_weights or {}).get(scheduling.tenant, 1),
            deadline=until(scheduling.deadline_ms),
            ttft_deadline=until(scheduling.ttft_deadline_ms),
            predicted_tokens=scheduling.predicted_tokens,
        )

    def _ends(self, params: SamplingParams) -> list[int]:
        """The token ids at which a sequence stops."""
        ends = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos)]
        return [token for token in ends if token < self._runner.model_config.vocab_size]

    def _salt(self, params: SamplingParams, scheduling: Scheduling) -> bytes:
        """Under equal salts KV blocks are shared; a prompt whose every position must be computed gets one of its own.

        No caller's salt can be equal to that: byte 255 is not in any text's UTF-8.
        """
        if params.prompt_logprobs is None:
            return (scheduling.cache_salt or "").encode()
        return b"\xff" + next(self._own_salts).to_bytes(8)

    def _launch(self, now: int, started: list[tuple[int, int, int]]) -> _Flight | None:
        """Plans a step and gives it to the runner, all but its sample; None if there is nothing to run. Adds to `started` who begins."""
        self.stage = "plan", time.monotonic()
        plan = self._scheduler.plan(self._buffers[self._turn], now)
        if plan is None:
            return None
        self._plans.append(plan)
        self.stage = "run", time.monotonic()
        for row, seq, tag, cached_tokens, queued in plan.admitted:
            self._take_seat(row, seq, tag)
            started.append((tag, cached_tokens, queued))
        self._runner.swap(plan.swap_out, plan.swap_in)
        sizes = Sizes(plan.num_tokens, plan.num_seqs, plan.num_samples, plan.num_copies, plan.num_table_writes)
        rows = self._runner.buffers[self._turn].sample_slots[: plan.num_samples]
        failed = np.isin(rows, list(self._failed_rows)) if self._failed_rows else None
        flight = _Flight(self._turn, sizes, self._tags[rows], failed)
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._pieces.fits(sizes.tokens, now):
            try:
                flight.step = self._runner.launch(flight.turn, *sizes)
            except OutOfMemory as error:
                self._pieces.short(sizes.tokens, error, now)
                flight.sizes = sizes._replace(copies=0)  # they are made
        return flight

    def _sample(self, flight: _Flight, starved: list[Mapping[str, Any]]) -> None:
        """Starts to sample a step, with those before it committed, or runs it in pieces; adds to `starved` the ledgers of who fails."""
        if flight.step is not None:
            try:
                return self._runner.sample(flight.step)
            except OutOfMemory as error:
                self._pieces.short(flight.sizes.tokens, error, _now())
            flight.step, flight.sizes = None, flight.sizes._replace(copies=0)
            self._seat_again(self._runner.buffers[flight.turn].batch_slots[: flight.sizes.seqs].tolist())
        flight.sampled, lost = self._pieces.run(flight.turn, flight.sizes, self._last_token, self._seat_again, _now())
        for row in lost:
            tag = int(self._tags[row])
            if (seat := self._live.get(tag)) is not None and seat.row == row:
                # Before the commit, so that no block keeps the name of what was not computed.
                self._scheduler.fail(seat.seq, _now())
                self._leave(tag)
                ledger = self._scheduler.explain(tag)
                assert ledger is not None  # it has just ended
                starved.append(ledger)

    def _last_token(self, row: int) -> int:
        """The token that a row sampled last; 0 where its sequence has ended, and what comes of it goes nowhere."""
        seat = self._live.get(int(self._tags[row]))
        return 0 if seat is None else int(np.frombuffer(self._scheduler.tokens(seat.seq)[0], dtype=np.int32)[-1])

    def _seat_again(self, rows: Iterable[int]) -> None:
        """Has the runner learn of the sequences in these rows anew, those that have not ended."""
        for row in rows:
            tag = int(self._tags[row])
            if (seat := self._live.get(tag)) is not None and seat.row == row:
                self._take_seat(row, seat.seq, tag)

    def _leave(self, tag: int) -> None:
        """Forgets a sequence that came to its end, and has its row left, unless that is somebody else's already."""
        row = self._live.pop(tag).row
        if row is not None and self._tags[row] == tag:
            self._runner.leave(row)

    def _abandon(self) -> None:
        """Ends every request and every step, none of which will be collected."""
        # Aborted before the commit: then no block keeps a name that rests on a step which never ran.
        for tag in list(self._live):
            self.abort(tag)
        self._flight = None
        while self._plans:
            plan = self._plans.popleft()
            self._scheduler.commit(plan, np.full(plan.num_samples, -1, dtype=np.int32), _now())
        self._runner.wait()

    def _take_seat(self, row: int, seq: int, tag: int) -> None:
        """Gives a sequence its row; what goes wrong with its settings there ends this sequence only."""
        tokens, prompt_len = self._scheduler.tokens(seq)
        seat, ids = self._live[tag], np.frombuffer(tokens, dtype=np.int32)
        seat.row, self._tags[row] = row, tag
        self._failed_rows.discard(row)
        try:
            matcher = None if seat.matcher is None else seat.matcher()
            ends = self._ends(seat.params)
            self._runner.seat(row, seat.params, ids, prompt_len, seat.seed, ends=ends, matcher=matcher, prompt=seat.prompt)
        except Exception:
            log.exception("sequence %d cannot be sampled, and ends with an error", tag)
            self._failed_rows.add(row)
            self._runner.seat(row, SamplingParams(temperature=0.0), ids, prompt_len, 0)  # what was there before may be half gone

    def _seed(self, tag: int, index: int, params: SamplingParams) -> int:
        """What a sequence's draws depend on: without a seed of its own it still draws independently of the others."""
        if params.seed is None:
            return hash((self.config.seed, tag))
        return hash((params.seed, index)) if index else params.seed

    def _record(self) -> None:
        """Moves what the scheduler recorded to the journal."""
        if self._journal is not None:
            self._journal.append(self._scheduler.journal(), flush=not self._live)


def _runner(
    config: EngineConfig, directory: Path, eos: frozenset[int], on_phase: Callable[[str, float], None]
) -> ModelRunner | NullExecutor:
    if config.load_format == "none":
        return NullExecutor(config, directory, eos)
    from chairlift.runner.runner import ModelRunner  # torch takes seconds to import

    return ModelRunner(config, directory, on_phase)


def _sampling_decision(config: EngineConfig, sampling: Mapping[str, Any]) -> tuple[str, str, str]:
    if config.generation_config == "none":
        return "default sampling", "temperature 1", "--generation-config says so"
    if not sampling:
        return "default sampling", "temperature 1", "the checkpoint recommends nothing"
    return "default sampling", ", ".join(f"{name} {value:g}" for name, value in sampling.items()), "recommended by the checkpoint"


def _told(sampled: Sampled, asked: np.ndarray, given: bytes) -> tuple[bytes, dict[int, bytes]]:
    """The log-probabilities of the tokens that were given to tags `given`, in that order, of those sampled for the tags `asked`.

    Each tag has one sample at most, and those that left since the step was planned got nothing.
    """
    logprobs = sampled.logprobs
    if len(given) == asked.nbytes:
        return logprobs.tobytes(), {int(asked[at]): line for at, line in sampled.details.items()}
    stayed = np.isin(asked, np.frombuffer(given, dtype=np.uint64))
    kept = logprobs[stayed] if logprobs.size else logprobs
    return kept.tobytes(), {int(asked[at]): line for at, line in sampled.details.items() if stayed[at]}


def _refusal(error: BaseException) -> BaseException:
    """What the core says of a request that it does not take, in the words of `chairlift.errors`."""
    match error:
        case _core.QueueFull():
            message, retry_after = error.args
            return QueueFull(message, retry_after=retry_after / 1e6)
        case _core.NoNewTokens():
            return InvalidRequest(str(error), param="max_tokens")
        case _core.TooLong() | _core.NeverFits():
            return InvalidRequest(str(error), param="prompt", code="context_length_exceeded")
        case _core.Rejected():
            return InvalidRequest(str(error), param="prompt")
    return error


def _now() -> int:
    return time.monotonic_ns() // 1000


def _microseconds(milliseconds: float) -> int:
    return int(milliseconds * 1000)
