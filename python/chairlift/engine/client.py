"""The engine for asyncio programs. It runs in a child process; each request is an async iterator."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from chairlift import errors
from chairlift.checkpoint.locate import locate
from chairlift.checkpoint.model_name import shown
from chairlift.config import EngineConfig
from chairlift.engine.arguments import Prompt, document_settings, engine_config, text_or_ids
from chairlift.engine.async_live_sequence import AsyncLiveSequence, AsyncSequences
from chairlift.engine.engine_info import EngineInfo, log_start
from chairlift.engine.engine_process import EngineProcess, reported
from chairlift.engine.frames import (
    Abort,
    AdapterChanged,
    Add,
    BadFrame,
    Explain,
    Explained,
    Failed,
    Frame,
    Load,
    LoadAdapter,
    Phase,
    Ready,
    Rejected,
    Snapshot,
    SnapshotRequest,
    StepOutputs,
    UnloadAdapter,
)
from chairlift.engine.held_sequences import COMPUTE, LEASE, HeldSequence
from chairlift.engine.questions import Questions, RememberedRequest, RememberedRequests
from chairlift.engine.request import default_params, deliver, encode_bad_words, validate
from chairlift.engine.stats import Stats
from chairlift.engine.stream import Stream
from chairlift.errors import ChairliftError, DeadlineMissed, EngineClosed, EngineDead, InvalidRequest, RequestMoved, SequenceDropped
from chairlift.outputs import RequestOutput, Timeline
from chairlift.sampling import MAX_SEQUENCES, SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.tokenizer import Tokenizer

log = logging.getLogger("chairlift")


@document_settings
class AsyncEngine:
    """An engine in a child process, for one event loop.

    Its settings are those of `config`, or the defaults, changed by keyword arguments. Use it with `async with`, or call `start` and
    `close`. Engines with the same `process` run in it, and share its time by `weight`; those of a lower `priority` go first, and those
    with a `target_itl_ms` are to have a step at least that often. An engine without `process` has one of its own. With a `hash_key` of
    16 bytes it tells `on_cache_change` what its prefix cache gains and loses, by names under this key.
    """

    tokenizer: Tokenizer
    """Set by `start`."""
    info: EngineInfo
    """The limits of the engine and the model. It has the defaults until the first start is complete."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        process: EngineProcess | None = None,
        weight: int = 1,
        priority: int = 0,
        hash_key: bytes = b"",
        **settings: Any,
    ) -> None:
        self.config = engine_config("AsyncEngine", settings, config)
        self.info = EngineInfo()
        self._modules = dict(self.config.lora_modules or {})
        self.adapters: dict[str, str] = dict(self._modules)
        """The directories of the loaded LoRA adapters, by name."""
        self.digests: dict[str, bytes] = {}
        """The hashes of the files of all adapters that were loaded, by name."""
        self._stats = Stats()
        self.on_end: Callable[[], None] | None = None
        """Called when an engine that was ready has died, before its requests fail."""
        self.on_cache_change: Callable[[bytes, bytes], None] = lambda cached, dropped: None
        """Called with the names of KV blocks that prompts can reuse now, and not any more, if there is a `hash_key`."""
        self._process = process or EngineProcess(self.config.load_format, exclusive=True)
        itl_ms = self.config.target_itl_ms
        self._load = Load({}, weight, priority, None if itl_ms is None else round(itl_ms * 1000), hash_key)
        self._number: int | None = None  # in the process, while it is started
        self._tags, self._seeds = self._process.tags, itertools.count(1, MAX_SEQUENCES)
        self._remembered = RememberedRequests()
        self._questions = Questions(self._write)
        self._streams: dict[int, Stream] = {}
        self.prompt_tokens = 0
        """Tokens of the prompts that the engine is expected to compute, of requests without a first token."""
        self._sequences = AsyncSequences(self, self.tell)
        self._phases: dict[str, float] = {}
        self._journals = itertools.count()
        self._death: EngineDead | None = EngineDead("the engine has not been started")
        self._started = False
        self._ended = asyncio.Event()

    def number_like(self, other: AsyncEngine) -> None:
        """Numbers requests and their seeds from the same counters as another engine, so that either may run the other's requests."""
        self._tags, self._seeds = other._tags, other._seeds

    @property
    def process(self) -> EngineProcess:
        """The process that runs the engine."""
        return self._process

    @property
    def open_sequences(self) -> int:
        """Sequences that were sent to the engine and have not ended."""
        return len(self._streams)

    @property
    def alive(self) -> bool:
        """Whether the engine exists, starting or ready."""
        return self._death is None

    @property
    def pid(self) -> int | None:
        """The id of the engine's process; None without one."""
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.alive and self._started

    async def start(self, since: float | None = None) -> None:
        """Loads the model, in a new process unless it runs, and returns when it is ready. Logs each phase.

        The logged total counts from `since` (of `time.perf_counter`), or from the call. Raises ModelNotFound, UnsupportedModel,
        OutOfMemory or EngineDead.
        """
        began = time.perf_counter() if since is None else since
        if self._number is not None:
            raise RuntimeError("the engine has been started already; close it first")
        self._stats, self._phases, self._remembered, self._started = Stats(), {}, RememberedRequests(), False
        self._is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The process starts first, because importing torch takes longest. The model is located meanwhile.
        self._number = await self._process.attach(self)
        self._death = None
        self._ended.clear()
        try:
            directory = await asyncio.to_thread(locate, self.config.model, self.config.revision, self.config.cache_dir)
            # Another machine has the model elsewhere.
            model = str(directory) if self._process.joined is None else self.config.model
            # A restarted engine loads the present adapters below.
            modules = None if self.info.model else {name: path for name, path in self._modules.items() if name in self.adapters}
            config = dataclasses.replace(self.config, model=model, journal=self._next_journal(), lora_modules=modules)
            self._write(dataclasses.replace(self._load, settings=dataclasses.asdict(config)))
            known = {} if modules is None else modules
            tokenizer = asyncio.to_thread(Tokenizer, directory, self.config.tokenizer, self.config.chat_template)
            self.tokenizer, _ = await asyncio.gather(tokenizer, self._is_ready)
            await self._reload_adapters(self.adapters.keys() - known.keys())
        except BaseException:
            await self.close()
            raise
        self.info = dataclasses.replace(self.info, model=shown(self.config.model))
        self._started = True
        log_start(self.config, self.info, self._phases, time.perf_counter() - began)

    async def close(self) -> None:
        """Ends the engine and frees its memory. Open requests raise EngineClosed. May be called repeatedly."""
        number, self._number = self._number, None
        if number is None:
            return
        running = self.alive
        self._fail(EngineClosed("the engine was closed"))
        if self._process.exclusive:
            await self._process.close()
            return
        self._process.detach(number)
        if running:
            await self._process.unload(number)

    def forget_tokenizer(self) -> None:
        """Frees the tokenizer of a closed engine; the next start reads it again. It takes some 100 MB for a large vocabulary."""
        vars(self).pop("tokenizer", None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes a prompt without blocking the event loop."""
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def load_lora_adapter(self, name: str, path: str) -> None:
        """Loads the LoRA adapter in the directory `path`, for requests with `SamplingParams(lora=name)`. Needs `enable_lora`.

        Raises InvalidRequest if the name is in use, InvalidSetting for its rank, and UnsupportedModel for unusable files.
        """
        path = os.path.abspath(path)
        self._check_alive()
        self.digests[name] = await self._change_adapter(lambda ask: LoadAdapter(ask, name, path))
        self.adapters[name] = path

    async def unload_lora_adapter(self, name: str) -> None:
        """Frees an adapter's memory. Raises InvalidRequest if it is not loaded, or while requests use it."""
        self._check_alive()
        await self._change_adapter(lambda ask: UnloadAdapter(ask, name))
        self.adapters.pop(name, None)

    async def _change_adapter(self, question: Callable[[int], Frame]) -> bytes:
        reply: AdapterChanged = await self._questions.ask(question)
        if reply.error is not None:
            kind = getattr(errors, reply.error)
            raise kind(reply.message, param="lora_name", code=reply.code) if kind is InvalidRequest else kind(reply.message)
        return reply.digest

    async def _reload_adapters(self, names: Iterable[str]) -> None:
        """Loads adapters into a restarted engine. It serves without those that cannot be read any more."""
        for name in sorted(names):
            path = self.adapters[name]
            try:
                self.digests[name] = await self._change_adapter(lambda ask, name=name, path=path: LoadAdapter(ask, name, path))  # type: ignore[misc]
            except EngineDead:
                raise
            except ChairliftError as error:
                if self._process.joined is not None:
                    raise  # the other engines have it
                del self.adapters[name]
                log.error("adapter %s cannot be loaded again: %s", name, error)

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> SamplingParams:
        """Returns the parameters with `max_tokens` filled in. Raises InvalidRequest if the model cannot run the request."""
        return validate(prompt_token_ids, params, self.info)

    def default_params(self, **settings: Any) -> SamplingParams:
        """The checkpoint's recommended sampling parameters (`--generation-config`), overridden by `settings`."""
        return default_params(self.info, settings)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
        *,
        request_id: str | None = None,
        on_start: Callable[[], None] | None = None,
        spent: Mapping[str, float] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request. Yields increments of its choices, by `index`; the last of each has a `finish_reason`.

        With `best_of`, the `n` best choices are yielded whole at the end. Closing or cancelling the iterator aborts the request; use
        `contextlib.aclosing` if the loop may end early. `request_id` is for `explain`. `on_start` is called once, when the engine
        admits the first choice. `spent` has the seconds of earlier timeline states: times and deadlines count from there. Raises
        InvalidRequest or QueueFull before the first increment, and RequestFailed, OutOfMemory, DeadlineMissed or EngineDead at any time.
        """
        called = time.monotonic()
        before = dict(spent or {})
        stream = await self.prepare(prompt, params, scheduling, arrived=called - sum(before.values()))
        before["tokenize"] = before.get("tokenize", 0.0) + time.monotonic() - called
        async with contextlib.aclosing(self.run(stream, request_id=request_id, on_start=on_start, spent=before)) as outputs:
            async for output in outputs:
                yield output

    async def open(self, prompt: Prompt, *, scheduling: Scheduling | None = None, lease: float = LEASE) -> AsyncLiveSequence:
        """Computes a prompt and returns it as a live sequence (see `LLM.open`). Errors as in `generate`, and TooManySequences."""
        content = text_or_ids(prompt)
        sequence = self.hold(await self.encode(content) if isinstance(content, str) else content, scheduling or Scheduling(), lease)
        try:
            await sequence.compute()
        except BaseException:
            sequence.drop()
            raise
        return sequence

    def hold(self, prompt_token_ids: list[int], scheduling: Scheduling, lease: float = LEASE) -> AsyncLiveSequence:
        """Returns a prompt as a live sequence, which is not computed yet. Raises InvalidRequest and TooManySequences."""
        self.validate(prompt_token_ids, COMPUTE)
        return self._sequences.open(prompt_token_ids, scheduling, lease)

    def abort_dropped(self, tag: int) -> None:
        """Ends the request that continues a live sequence, because that was dropped."""
        if (stream := self._streams.get(tag)) is not None:
            self._leave(stream.tags)
            stream.fail(SequenceDropped("the sequence was dropped while it was generated"))

    def move_requests(self) -> None:
        """Ends all open requests with RequestMoved, so that another engine goes on with them."""
        for stream in set(self._streams.values()):
            self._leave(stream.tags)
            stream.fail(RequestMoved("the engine will be restarted"))

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
        *,
        arrived: float | None = None,
        sequence: HeldSequence | None = None,
    ) -> Stream:
        """Makes a request of a prompt, for `run`. `arrived` is when its first byte was read, on the monotonic clock; now by default.

        A request without a seed gets one here, so that every engine draws the same tokens for it. A request that continues `sequence` must
        run while that is `generating` or `computing`. Raises InvalidRequest.
        """
        self._check_alive()
        content = text_or_ids(prompt)
        prompt_token_ids = await self.encode(content) if isinstance(content, str) else content
        params = self.default_params() if params is None else params
        _check_kind("params", params, SamplingParams)
        scheduling = Scheduling() if scheduling is None else scheduling
        _check_kind("scheduling", scheduling, Scheduling)
        if params.bad_words:
            params = await asyncio.to_thread(encode_bad_words, params, self.tokenizer)
        params = self.validate(prompt_token_ids, params)
        seed = next(self._seeds)
        if params.seed is None:
            params = dataclasses.replace(params, seed=hash((self.config.seed, seed)))
        return Stream(self.tokenizer, next(self._tags), prompt_token_ids, params, scheduling, arrived=arrived, sequence=sequence)

    async def run(
        self,
        stream: Stream,
        *,
        request_id: str | None = None,
        on_start: Callable[[], None] | None = None,
        spent: Mapping[str, float] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request of `prepare`: see `generate`. `spent` are all seconds since its arrival.

        After EngineDead it may be called again once another engine is ready. That engine goes on after the last token, and the increments
        go on after the last one that was yielded.
        """
        self.prompt_tokens += stream.expected_tokens
        computed = False
        try:
            self._check_alive()
            stream.on_start = on_start
            request = stream.begin(spent)
            if request_id is not None:
                self._remembered.add(request_id, RememberedRequest(stream.tags, stream.timelines()))
            unfinished = stream.unfinished()
            self._streams.update(dict.fromkeys(unfinished, stream))
            if unfinished:
                self._write(Add(request.tag, request.pack()))
            await self._process.drain()
            while not stream.over:
                outputs = await stream.next()
                if not computed:
                    computed = True
                    self._computed(stream)
                if stream.some_over:
                    self._leave(stream.finished(), stopped=True)
                for output in outputs:
                    if output.finish_reason == "deadline":
                        stream.missed_deadline, output.finish_reason = True, None
                    if output.finish_reason is not None or output.token_ids or output.text:
                        yield output
        finally:
            if not computed:
                self._computed(stream)
            self._leave(stream.tags)
        if stream.missed_deadline:
            raise DeadlineMissed(
                f"the request was dropped after {stream.num_tokens} tokens of output, since it missed its deadline or would surely have "
                "missed it: allow more time, or ask for fewer tokens",
                prompt_tokens=len(stream.prompt_token_ids),
                completion_tokens=stream.num_tokens,
            )

    async def explain(self, request_id: str) -> list[Timeline]:
        """The timelines of a request's sequences, also while it runs; empty if the request is unknown."""
        self._check_alive()
        remembered = self._remembered.get(request_id)
        return [] if remembered is None else [*remembered.ended, *await self.explain_sequences(remembered.tags)]

    async def explain_sequences(self, tags: Sequence[int]) -> list[Timeline]:
        """The timelines of these tags; unknown tags are left out."""
        timelines: list[Timeline] = await self._ask(lambda ask: Explain(ask, list(tags))) if tags else []
        return timelines

    async def take_snapshot(self) -> dict[str, Any]:
        """The scheduler's state (see `Scheduler.snapshot`), with `names`: (tag, request id) of its requests."""
        snapshot: dict[str, Any] = await self._ask(SnapshotRequest)
        present = {one["tag"] for one in [*snapshot["running"], *snapshot["waiting"]]}
        return snapshot | {"names": [(tag, name) for tag, name in self._remembered.tags() if tag in present]}

    async def ended(self) -> None:
        """Waits until the engine has ended, by `close` or by itself."""
        await self._ended.wait()

    @property
    def stuck(self) -> tuple[str, float] | None:
        """The stage in which the engine is stuck and the seconds since; None if it is not. See `Heartbeat.stuck`."""
        return self._process.stuck if self.alive else None

    def stats(self) -> Stats:
        """The engine's newest counters, at most a fraction of a second old while it works; the defaults before it is ready."""
        return self._stats

    async def _ask(self, question: Callable[[int], Frame]) -> Any:
        self._check_alive()
        return await self._questions.ask(question)

    def _computed(self, stream: Stream) -> None:
        """Counts a request's prompt no more."""
        self.prompt_tokens -= stream.expected_tokens
        if stream.on_computed is not None:
            stream.on_computed()

    def _leave(self, tags: Iterable[int], *, stopped: bool = False) -> None:
        """Forgets sequences and aborts those that still run; `stopped` if a stop string was found."""
        running = [tag for tag in tags if self._streams.pop(tag, None) is not None]
        if running and self.alive:
            self._write(Abort(running, stopped))

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(str(self._death))
        if not self._started:
            raise EngineDead("the engine is not ready yet")

    def _next_journal(self) -> str | None:
        """The journal's path. A restarted engine gets a new file."""
        number = next(self._journals)
        return f"{self.config.journal}.{number}" if self.config.journal and number else self.config.journal

    def tell(self, frame: Frame) -> None:
        """Sends a frame that the next engine does not need, if this one is ready."""
        if self.ready:
            self._write(frame)

    def _write(self, frame: Frame) -> None:
        assert self._number is not None  # it is started
        self._process.write(self._number, frame)

    def on_frame(self, frame: Frame) -> None:
        """Handles a frame of the engine, for its process. Raises BadFrame."""
        match frame:
            case StepOutputs():
                if frame.cached or frame.dropped:
                    self.on_cache_change(frame.cached, frame.dropped)
                if frame.stats:
                    self._stats = dataclasses.replace(self._stats, **frame.stats)
                if not self._is_ready.done():  # the engine waits for work
                    self._is_ready.set_result(None)
                for stream in deliver(frame, self._streams):
                    stream.wake()
            case Rejected():
                if (rejected := self._streams.get(frame.tag)) is not None:
                    for tag in rejected.tags:
                        self._streams.pop(tag, None)
                    rejected.reject(frame)
            case Explained():
                self._questions.answer(frame.ask, [Timeline.read(timeline) for timeline in frame.timelines])
            case AdapterChanged():
                self._questions.answer(frame.ask, frame)
            case Snapshot():
                self._questions.answer(frame.ask, frame.snapshot)
            case Phase():
                log.info("phase %s %.2f s", frame.name, frame.seconds)
                self._phases[frame.name] = frame.seconds
            case Ready():
                self.info = EngineInfo.unpack(frame.info)
                self.digests.update((name, bytes.fromhex(digest)) for name, digest in self.info.adapter_digests.items())
            case Failed():
                if self._number is not None:
                    self._process.detach(self._number)
                if self._process.exclusive:
                    self._process.kill()
                self.on_exit()
                self.on_death(reported(frame))
            case _:
                raise BadFrame(f"unexpected frame from an engine: {frame!r:.100}")

    def on_exit(self) -> None:
        """Rejects new requests because the engine's process exits. Open requests fail when the reason is known."""
        if self._death is None:
            self._death = EngineDead("the engine's process has ended")
            if self._started and self.on_end is not None:
                self.on_end()

    def on_death(self, error: ChairliftError) -> None:
        """Marks the engine as dead and fails all open requests and questions."""
        if self._started and not isinstance(error, EngineClosed):  # otherwise `start` raises it
            log.error("engine dead: %s", error)
        self._fail(error)

    def _fail(self, death: ChairliftError) -> None:
        self._death = death if isinstance(death, EngineDead) else EngineDead(str(death))
        for stream in self._streams.values():
            stream.fail(type(self._death)(str(death)))
        self._questions.fail(self._death)
        self._streams.clear()
        self._ended.set()
        if not self._is_ready.done():
            self._is_ready.set_exception(death)
            self._is_ready.exception()  # marks it as retrieved


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be {kind.__name__}, got {value!r:.50}", param=name)
