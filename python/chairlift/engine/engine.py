"""The engine: plans, runs and commits steps, on one thread."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chairlift import _core
from chairlift.checkpoint.generation_config import recommended_sampling
from chairlift.checkpoint.locate import locate
from chairlift.checkpoint.tokenizer_files import tokenizer_file
from chairlift.config import EngineConfig
from chairlift.engine import clock, scheduler_settings
from chairlift.engine.adapters import Adapters, PackedAdapter
from chairlift.engine.energy import EnergyAccount, open_meter
from chairlift.engine.engine_info import engine_info
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.file_checks import check_files
from chairlift.engine.frames import StepOutputs
from chairlift.engine.journal import Journal
from chairlift.engine.kv_sharing import SharedBlocks
from chairlift.engine.mask_time import MaskTime
from chairlift.engine.sequences import Sequences, check_grammar
from chairlift.engine.snapshot import EngineSnapshot
from chairlift.engine.stats import Stats
from chairlift.engine.steps import Step, Steps, logprobs_of
from chairlift.errors import InvalidRequest, InvalidSetting
from chairlift.grammar.grammar import Grammar
from chairlift.grammar.grammars import Grammars
from chairlift.grammar.trial import Vocabulary
from chairlift.runner.description import checkpoint_info
from chairlift.runner.null_runner import NullRunner
from chairlift.scheduling import TIER_WEIGHTS
from chairlift.tokenizer import eos_token_ids

if TYPE_CHECKING:
    from chairlift.engine.disk_cache import DiskCache, StoredPrefix
    from chairlift.runner.interface import Runner


OnPrepared = Callable[[Callable[[], None]], None]
"""See `Engine.add`."""
SNAPSHOT_WAITING, SNAPSHOT_CELLS = 64, 4096
"""Most waiting requests and most cells of the KV map in a snapshot."""


class Engine:
    """A model, its KV cache and the scheduler that shares them among requests.

    Call `add` and `abort` between steps and `step` while `has_work`. Not thread-safe. `on_phase(name, seconds)` is called after each
    phase of the start.
    """

    def __init__(
        self, config: EngineConfig, on_phase: Callable[[str, float], None] = lambda name, seconds: None, hash_key: bytes = b""
    ) -> None:
        """With a `hash_key` of 16 bytes, steps report what the prefix cache gains and loses, by names under this key."""
        self.config = config
        check_files(config)
        # Before the weights are loaded, so that of two engines with one journal the second is refused at once.
        self._journal = None if config.journal is None else Journal(config.journal)
        try:
            self._start(config, on_phase, hash_key)
            if self._journal is not None:
                self._journal.begin()  # last: an engine that cannot start leaves what an earlier one wrote
        except BaseException:
            if self._journal is not None:
                self._journal.abandon()
            raise

    def _start(self, config: EngineConfig, on_phase: Callable[[str, float], None], hash_key: bytes) -> None:
        """Loads the model and prepares what requests need."""
        directory = locate(config.model, config.revision, config.cache_dir)
        eos = eos_token_ids(directory, config.tokenizer)
        sampling = recommended_sampling(directory) if config.generation_config == "auto" else {}
        self.runner = runner = _build_runner(config, directory, eos, on_phase)
        self._scheduler = _build_scheduler(config, runner, sorted(eos), hash_key or secrets.token_bytes(16))
        if hash_key:
            self._scheduler.record_cache_changes()
        self._eos = sorted(eos)
        self._adapters = Adapters(config, runner)
        self._mask_time = MaskTime(*_weights(config))
        self._sequences = Sequences(config.seed, self._scheduler, runner, self._eos, self._adapters, self._mask_time)
        self._energy = EnergyAccount(open_meter(config.energy_meter, config.tensor_parallel_size), self._scheduler)
        self._steps = Steps(config, self._scheduler, runner, self._sequences, self._energy)
        self._in_flight: Step | None = None  # launched, but not sampled
        vocab_size = runner.model_config.vocab_size
        ends = tuple(token for token in self._eos if token < vocab_size)
        self._grammars = Grammars(Vocabulary(tokenizer_file(directory, config.tokenizer), vocab_size, ends))
        self._energy.read(clock.now())
        info = engine_info(config, directory, runner, checkpoint_info(directory, runner.model_config), self._eos, sampling)
        self._disk_cache = _open_disk_cache(config, self._scheduler, runner, info.fingerprint)
        contents = None if self._disk_cache is None else self._disk_cache.contents
        self.info = replace(info, adapter_digests=self._adapters.digests, disk_cache=contents)
        self._kv_blocks = None if config.num_kv_blocks is not None else runner.kv_blocks

    @property
    def has_work(self) -> bool:
        """Whether any request or step is unfinished."""
        return bool(self._sequences or self._steps)

    @property
    def in_flight(self) -> bool:
        """Whether a step was begun and has not ended."""
        return self._in_flight is not None

    @property
    def stage(self) -> tuple[str, float]:
        """The current stage, and its start on the monotonic clock: a part of a step, or a stage that the engine's process sets."""
        return self._steps.stage

    @stage.setter
    def stage(self, stage: tuple[str, float]) -> None:
        self._steps.stage = stage

    @property
    def shared_blocks(self) -> SharedBlocks | None:
        """The KV blocks whose memory other engines can use; None with `--num-kv-blocks` or on a device."""
        if self._kv_blocks is None:
            return None
        runner, size = self.runner, self.config.block_size
        # The last token of a sequence needs no KV.
        least = max(1, -(-(runner.max_model_len - 1) // size))
        each = runner.kv_cache_bytes // runner.num_kv_blocks
        return SharedBlocks(each, least, runner.num_kv_blocks - 1, self.config.kv_cache_memory_bytes, runner.state_bytes)

    def blocks_used(self) -> tuple[int, int, int]:
        """Blocks that sequences hold, that are held or cached, and that running and waiting sequences could use."""
        return self._scheduler.blocks_used()

    def set_block_limit(self, blocks: int) -> int:
        """Sets the most KV blocks that may have memory, between two steps. Returns the limit that applies.

        Blocks beyond it give their memory back to the system: free and cached ones at once, others when their sequences end.
        """
        limit = self._scheduler.set_block_limit(blocks, clock.now())
        self._discard_blocks()
        return limit

    def compile(self, request: EngineRequest) -> Future[Grammar] | None:
        """Starts compiling the request's grammar on another thread; None if it has none. Raises QueueFull."""
        if (structure := request.sampling.structured_output) is None:
            return None
        tenant, group = request.scheduling.tenant, request.scheduling.limit_group
        return self._grammars.compile(structure, tenant if group is None else group, tenant)

    def read_prefix(self, request: EngineRequest) -> Future[StoredPrefix] | None:
        """Starts reading the KV of the prompt's beginning from disk; None if there is none to read."""
        if self._disk_cache is None or not self._may_read(request):
            return None
        return self._disk_cache.read(np.frombuffer(request.prompt, dtype=np.int32), request.scheduling.cache_group)

    def _may_read(self, request: EngineRequest) -> bool:
        """Whether KV on disk may be that of the request's prompt."""
        params, scheduling = request.sampling, request.scheduling
        shared = not scheduling.cache_salt and params.lora is None and params.prompt_logprobs is None
        return self._disk_cache is not None and shared

    def add(self, request: EngineRequest, on_prepared: OnPrepared | None = None) -> None:
        """Queues a request.

        If its grammar is compiled or its KV is read from disk, the call waits. With `on_prepared` the request waits in the queue instead.
        The KV of a parked session is read when its turn has come. When the request can go on, `on_prepared` is called, on any thread, with
        a function that the caller then calls between two steps; that may raise InvalidRequest, if the grammar cannot be used. Raises
        InvalidRequest if the request can never run and QueueFull if it cannot wait.
        """
        params = request.sampling
        if not self.runner.has_logprobs and (params.logprobs is not None or params.prompt_logprobs is not None):
            raise InvalidRequest("without a model (--load-format none) there are no log-probabilities: leave them out", param="logprobs")
        grammar = self.compile(request)
        if grammar is not None and not grammar.done() and on_prepared is not None:
            try:
                self._sequences.add(request, clock.now(), grammar, "grammar")
            except BaseException:
                self._sequences.release(grammar)
                raise
            go_on = partial(self._use_grammar, request, grammar, on_prepared)
            grammar.add_done_callback(lambda _: on_prepared(go_on))
            return
        if grammar is not None:
            check_grammar(request, grammar)
        self._sequences.add(request, clock.now(), grammar, "read_cache" if self._may_read(request) else None)
        self._expect_read(request, on_prepared)

    def _use_grammar(self, request: EngineRequest, grammar: Future[Grammar], on_prepared: OnPrepared) -> None:
        """Goes on with a request whose grammar is compiled. Raises InvalidRequest if that cannot be used."""
        if not self._sequences.live(request):
            return
        with self._aborted_on_error(request):
            check_grammar(request, grammar)
            self._sequences.prepare(request, "read_cache" if self._may_read(request) else None, clock.now())
        self._expect_read(request, on_prepared)

    def _expect_read(self, request: EngineRequest, on_prepared: OnPrepared | None) -> None:
        """Has the KV of a request that was added read from disk when it is its session's turn, which may be now."""
        if self._may_read(request):
            self._sequences.expect_read(request, partial(self._begin_read, request, on_prepared))
            self._begin_reads()

    def _begin_reads(self) -> bool:
        """Begins the reads of requests whose turn has come. Returns whether one of them can run now."""
        can_run = False
        for tag in self._scheduler.take_reads():
            if (state := self._sequences.get(tag)) is not None and state.read is not None:
                can_run |= state.read()
        return can_run

    def _begin_read(self, request: EngineRequest, on_prepared: OnPrepared | None) -> bool:
        """Reads a request's KV from disk. Returns whether it can run now."""
        with self._aborted_on_error(request):
            stored = self.read_prefix(request)
            if stored is None:
                self._sequences.prepare(request, None, clock.now())
            else:
                self._use_stored(request, stored, on_prepared)
            return stored is None or stored.done()

    def _use_stored(self, request: EngineRequest, stored: Future[StoredPrefix], on_prepared: OnPrepared | None) -> None:
        """Puts KV that is read from disk into the cache, and lets its request run."""
        if not stored.done() and on_prepared is not None:
            go_on = partial(self._use_stored, request, stored, on_prepared)
            stored.add_done_callback(lambda _: on_prepared(go_on))
            return
        if self._disk_cache is not None and self._sequences.live(request):
            with self._aborted_on_error(request):
                self._disk_cache.put(stored.result(), clock.now())
                self._sequences.prepare(request, None, clock.now())

    @contextmanager
    def _aborted_on_error(self, request: EngineRequest) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for tag in self._sequences.live(request):
                self.abort(tag)
            raise

    def abort(self, tag: int, *, stopped: bool = False) -> bool:
        """Ends a sequence without further output and frees its memory; False if it has ended already.

        `stopped` counts it as finished by a stop string instead of aborted.
        """
        now = clock.now()
        self._energy.read(now)
        state = self._sequences.get(tag)
        found = self._sequences.abort(tag, now, stopped=stopped)
        if state is not None:
            self._steps.free(tag, state.slot)
        if found:
            self._write_journal()
        return found

    def fork_sequence(self, handle: int, forks: Sequence[int]) -> None:
        """Opens held sequences with these handles, which share the blocks of `handle`. Does nothing if that is unknown."""
        self._scheduler.fork_held(handle, forks, clock.now())

    def drop_sequence(self, handle: int) -> None:
        """Drops a held sequence, if it is known. Its blocks are free in the next step."""
        self._scheduler.drop_held(handle, clock.now())

    def note_session(self, tenant: str, session: str, event: str) -> None:
        """Records that a session `awaits_user` or has `ended`. Does nothing if it is unknown. Raises ValueError for another event."""
        self._scheduler.note_session(tenant, session, event, clock.now())

    def read_adapter(self, path: str) -> PackedAdapter:
        """Reads a LoRA adapter for `load_adapter`. May be called on any thread, also during a step.

        Raises InvalidRequest without `--enable-lora`, InvalidSetting for its rank, and UnsupportedModel for unusable files.
        """
        return self._adapters.read(path)

    def load_adapter(self, name: str, adapter: PackedAdapter) -> None:
        """Loads an adapter, which requests then name in `SamplingParams.lora`. Raises InvalidRequest if the name is in use."""
        self._adapters.add(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter's memory. Raises InvalidRequest if it is not loaded, or while requests use it."""
        if uses := self._sequences.uses(self._adapters.get(name)):
            raise InvalidRequest(
                f"{uses} sequences use the adapter {name!r:.100}: wait until they end", param="lora_name", code="adapter_busy"
            )
        self._adapters.remove(name)

    def next_step(self) -> tuple[int, int] | None:
        """See `Scheduler.next_step`."""
        return self._scheduler.next_step()

    def take_service(self) -> dict[str, int]:
        """See `Scheduler.take_service`."""
        return self._scheduler.take_service()

    def charge_external(self, service: Mapping[str, int]) -> None:
        """Charges tenants for service other than tokens of this engine: see `Scheduler.charge_external`."""
        for tenant, us in service.items():
            self._scheduler.charge_external(tenant, us)

    def set_priority(self, tag: int, priority: int) -> None:
        """Moves a sequence that has not ended to another class."""
        if (request := self._sequences.get(tag)) is not None:
            self._scheduler.set_priority(request.seq, priority, clock.now())

    def step(self) -> StepOutputs | None:
        """Expires missed deadlines and runs one step of the model; None if there was neither.

        If steps overlap, the next step is planned and launched before this one's tokens are collected, and sampled after they are
        committed, because its grammars and biases depend on them. A step that the device lacks memory for is split. Any other error of
        the runner ends every request and is raised; the engine remains usable.
        """
        # Choose: the step in flight, or a new one.
        self._steps.enter("plan")
        now = clock.now()
        expired = self._expire(now)
        started: list[tuple[int, int, int, int]] = []
        starved: list[_core.Timeline] = []
        try:
            step, self._in_flight = self._in_flight, None
            if step is None:
                step = self._steps.launch(now, started)
                while step is None and self._begin_reads():
                    step = self._steps.launch(now, started)
                if step is None:
                    self._write_journal()
                    return StepOutputs(ended=expired) if expired else None
                self._steps.sample(step, starved)
            # Plan and run the next step while the device runs this one.
            if self.runner.overlaps:
                self._in_flight = self._steps.launch(now, started)
            sampled = self._steps.collect(step)
        except BaseException:
            self._abandon()
            raise
        # Commit.
        outputs = self._steps.commit(sampled)
        self.charge_external(self._mask_time.take())
        self._discard_blocks()
        if self._disk_cache is not None:
            self._disk_cache.write_some()
            self._begin_reads()
        if self._in_flight is not None:
            try:
                self._steps.sample(self._in_flight, starved)
            except BaseException:
                self._abandon()
                raise
        self._write_journal()
        logprobs, details = logprobs_of(sampled, step.tags, outputs.tags)
        cached, dropped = self._scheduler.take_cache_changes()
        return StepOutputs(
            outputs.tags,
            outputs.tokens,
            outputs.finishes,
            logprobs,
            started,
            [*expired, *outputs.ended, *starved],
            details=details,
            prompts=sampled.prompts,
            starved=[timeline["tag"] for timeline in starved],
            cached=cached,
            dropped=dropped,
            refusals={int(step.tags[at]): reason for at, reason in sampled.refusals.items()},
        )

    def wakes_in(self) -> float | None:
        """After a step that returned None: seconds until a step may have work without another `add`; None for never."""
        at = self._scheduler.wake_at()
        return None if at is None else max(0, at - clock.now()) / 1e6

    def explain(self, tag: int) -> _core.Timeline | None:
        """The timeline of a sequence; None if it is unknown or ended too long ago."""
        return self._scheduler.explain(tag)

    def snapshot(self) -> EngineSnapshot:
        """The running and waiting requests, the KV map and the steps since the last snapshot."""
        seen = self._scheduler.snapshot(clock.now(), SNAPSHOT_WAITING, SNAPSHOT_CELLS)
        return {**seen, "now_us": clock.now(), "stats": self.stats().counters(), "names": []}

    def stats(self) -> Stats:
        """The counters and gauges, without those of tenants and classes (see `usage`)."""
        disk = self._disk_cache.stats() if self._disk_cache else {}
        return Stats(**{**self._scheduler.stats(), **disk}, steps_short_of_memory=self._steps.short_of_memory)

    def usage(self) -> _core.Usage:
        """The usage of each tenant and class: the fields `tenants` and `classes` of `Stats`."""
        return self._scheduler.usage()

    def check(self) -> None:
        """Panics unless every invariant of the scheduler holds; for tests."""
        self._scheduler.check()

    def close(self) -> None:
        """Flushes the journal and ends other processes. Unfinished requests get no more output."""
        if self._journal is not None:
            self._write_journal()
            self._journal.close()
        self._grammars.close()
        if self._in_flight is not None:
            self.runner.wait()
        if self._disk_cache is not None:
            self._disk_cache.close()
        self.runner.close()
        self._energy.close()

    def save_prefixes(self, seconds: float) -> None:
        """Writes the KV of prompt beginnings to disk before a clean stop, for at most `seconds`, if there is a directory for it."""
        if self._disk_cache is not None:
            self._disk_cache.save(seconds)

    def _expire(self, now: int) -> list[_core.Timeline]:
        """Ends the requests that missed their deadlines and returns their timelines."""
        expired = self._scheduler.expire(now)
        for timeline in expired:
            self._steps.remove(timeline["tag"])
        return expired

    def _discard_blocks(self) -> None:
        """Returns the memory of blocks that the scheduler has given back. All planned steps must have run."""
        if self._kv_blocks is not None and (blocks := self._scheduler.take_given_back()):
            self._kv_blocks.discard(blocks)

    def _abandon(self) -> None:
        """Ends every request and discards every step."""
        # Requests end before the commit, so that the prefix cache keeps no block of a step that never ran.
        self._sequences.abort_all(clock.now())
        self._write_journal()
        self._in_flight = None
        self._steps.discard()

    def _write_journal(self) -> None:
        """Appends the scheduler's new records to the journal."""
        if self._journal is not None:
            self._journal.append(self._scheduler.journal(), flush=not self._sequences)


def _open_disk_cache(config: EngineConfig, scheduler: _core.Scheduler, runner: Runner, fingerprint: str | None) -> DiskCache | None:
    if config.prefix_cache_dir is None:
        return None
    if runner.kv_blocks is None or fingerprint is None or not config.enable_prefix_caching:
        raise InvalidSetting("--prefix-cache-dir needs a prefix cache and a model that the CPU kernels compute: leave it out")
    from chairlift.engine.disk_cache import DiskCache
    from chairlift.engine.prefix_store import PrefixStore

    store = PrefixStore(config.prefix_cache_dir, config.prefix_cache_disk, fingerprint)
    return DiskCache(scheduler, runner.kv_blocks, runner.state_storage, runner.num_kv_blocks, config.block_size, store)


def _build_runner(config: EngineConfig, directory: Path, eos: frozenset[int], on_phase: Callable[[str, float], None]) -> Runner:
    if config.load_format == "none":
        return NullRunner(config, directory, eos)
    from chairlift.runner.build import build_runner  # torch takes seconds to import
    from chairlift.runner.encoder_runner import EncoderRunner

    return EncoderRunner.find(config, directory, on_phase) or build_runner(config, directory, on_phase)


def _build_scheduler(config: EngineConfig, runner: Runner, eos: list[int], hash_key: bytes) -> _core.Scheduler:
    experts, experts_used = runner.model_config.expert_counts
    settings = scheduler_settings.of_config(
        config,
        num_kv_blocks=runner.num_kv_blocks,
        block_size=config.block_size,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        max_num_seqs=runner.max_num_seqs,
        max_model_len=runner.max_model_len,
        host_blocks=runner.host_blocks,
        swap_ns_per_block=runner.swap_ns_per_block,
        state_slots=runner.state_slots,
        state_tokens=_state_tokens(config, runner),
        experts=experts,
        experts_used=experts_used,
        **({} if runner.generates else {"enable_prefix_caching": False}),
    )
    tenant_weights, tier_weights = _weights(config)
    return _core.Scheduler(
        **settings,
        # Where a device overlaps steps, the last token is not known yet when the next step is planned.
        draft_tokens=0 if runner.overlaps else config.num_speculative_tokens,
        draft_corpus_tokens=0 if runner.overlaps else config.draft_corpus_tokens,
        tenant_weights=tenant_weights,
        tier_weights=tier_weights,
        end_tokens=eos,
        journal=config.journal is not None,
        hash_key=int.from_bytes(hash_key),
    )


def _state_tokens(config: EngineConfig, runner: Runner) -> int:
    """Tokens whose KV takes as much memory as a recurrent state; 0 for a model without such states."""
    if not runner.state_bytes:
        return 0
    return -(-runner.model_config.state_bytes * config.block_size * runner.num_kv_blocks // runner.kv_cache_bytes)


def _weights(config: EngineConfig) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The factors of tenants' shares, by tenant and by tier."""
    return config.tenant_weights or {}, {**TIER_WEIGHTS, **(config.tier_weights or {})}
