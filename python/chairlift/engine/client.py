"""The engine for asyncio programs. It runs in a child process; each request is an async iterator."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from chairlift import errors
from chairlift.checkpoint.locate import locate
from chairlift.checkpoint.model_name import shown
from chairlift.config import EngineConfig
from chairlift.engine.arguments import ChatOptions, Message, document_settings, engine_config, sampling
from chairlift.engine.engine_client import EngineClient
from chairlift.engine.engine_info import EngineInfo, log_start
from chairlift.engine.engine_process import EngineProcess, reported
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.engine_settings import ModelSettings
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
from chairlift.engine.questions import Questions, Remembered
from chairlift.engine.snapshot import EngineSnapshot
from chairlift.engine.stats import Stats
from chairlift.errors import ChairliftError, EngineClosed, EngineDead, InvalidRequest, RequestMoved
from chairlift.outputs import RequestOutput, Timeline
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling
from chairlift.tokenizer import Tokenizer

log = logging.getLogger("chairlift")

EXPLAINED_AT_ONCE = 16
"""Timelines for which an engine is asked at once: it makes them between two steps, and the event loop reads them in one callback."""


@document_settings
class AsyncEngine(EngineClient):
    """An engine in a child process, for one event loop.

    Its settings are those of `config`, or the defaults, changed by keyword arguments. A model's name or path may stand for `config`.
    Use it with `async with`, or call `start` and `close`. Engines with the same `process` run in it, and share its time by `weight`;
    those of a lower `priority` go first, and those with a `target_itl_ms` are to have a step at least that often. An engine without
    `process` starts a process for itself. `hash_key` is 16 bytes. With it the engine calls `on_cache_change` with the
    names, under this key, of the blocks that its prefix cache gains and loses.
    """

    def __init__(
        self,
        config: EngineConfig | str | os.PathLike[str] | None = None,
        *,
        process: EngineProcess | None = None,
        weight: int = 1,
        priority: int = 0,
        hash_key: bytes = b"",
        **settings: Unpack[ModelSettings],
    ) -> None:
        if isinstance(config, EngineConfig | None):
            config = engine_config("AsyncEngine", settings, config)
        else:
            config = engine_config("AsyncEngine", dict(model=config, **settings))
        self._process = process or EngineProcess(config.load_format, exclusive=True)
        super().__init__(config, self._process.tags)
        self._modules = dict(self.config.lora_modules or {})
        self.adapters: dict[str, str] = dict(self._modules)
        """The directories of the loaded LoRA adapters, by name."""
        self.digests: dict[str, bytes] = {}
        """The hashes of the files of all adapters that were loaded, by name."""
        self._stats = Stats()
        self.on_end: Callable[[], None] | None = None
        """Called when an engine that was ready has died, before its requests fail."""
        self.new_counters: Callable[[], AbstractContextManager[None]] = nullcontext
        """Called when the next engine starts; `stats` has the counters of the one before until the context is entered."""
        self.on_cache_change: Callable[[bytes, bytes], None] = lambda cached, dropped: None
        """Called with the names of KV blocks that prompts can reuse now, and not any more, if there is a `hash_key`."""
        itl_ms = self.config.target_itl_ms
        self._load = Load({}, weight, priority, None if itl_ms is None else round(itl_ms * 1000), hash_key)
        self._number: int | None = None  # in the process, while it is started
        self._questions = Questions(self._write)
        self._phases: dict[str, float] = {}
        self._journals = 0
        self._death: EngineDead | None = EngineDead("the engine has not been started: use 'async with', or await start()")
        self._started = self._closed = False
        self._ended = asyncio.Event()

    @property
    def process(self) -> EngineProcess:
        """The process that runs the engine."""
        return self._process

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
            raise ChairliftError("the engine has been started already: close it first")
        self._loop = asyncio.get_running_loop()
        with self.new_counters():
            self._stats = Stats()
        self._phases, self._remembered, self._started = {}, Remembered(), False
        self._is_ready: asyncio.Future[None] = self._loop.create_future()
        self._closed = False
        # The process starts first, because importing torch takes longest. The model is located meanwhile.
        self._number = await self._process.attach(self)
        self._death = None
        self._ended.clear()
        try:
            self._check_open()
            directory = await asyncio.to_thread(locate, self.config.model, self.config.revision, self.config.cache_dir)
            # Another machine has the model elsewhere.
            model = str(directory) if self._process.joined is None else self.config.model
            # A restarted engine loads the present adapters below.
            modules = None if self.info.model else {name: path for name, path in self._modules.items() if name in self.adapters}
            config = dataclasses.replace(self.config, model=model, journal=self._next_journal(), lora_modules=modules)
            self._write(dataclasses.replace(self._load, settings=dataclasses.asdict(config)))
            self._tokenizer, _ = await asyncio.gather(asyncio.to_thread(self._read_tokenizer, directory), self._is_ready)
            await self._reload_adapters(dict(modules or {}))
            self._check_open()
        except BaseException:
            await self.close()
            raise
        self._info = dataclasses.replace(self.info, model=shown(self.config.model))
        self._started = True
        self._journals += 1
        log_start(self.config, self.info, self._phases, time.perf_counter() - began)

    def _read_tokenizer(self, directory: Path) -> Tokenizer:
        tokenizer = Tokenizer(directory, self.config.tokenizer, self.config.chat_template)
        tokenizer.prepare()
        return tokenizer

    async def close(self) -> None:
        """Ends the engine and frees its memory. Open requests raise EngineClosed. May be called repeatedly.

        Raises ChairliftError in another event loop than that of `start`, unless that one has ended.
        """
        if self._number is None:
            self._closed = True  # for a `start` that has not got its number yet
            return
        if self._loop.is_closed():
            self._lose_loop()
            return
        self._check_loop()
        self._closed = True
        number, self._number = self._number, None
        running = self.alive
        self._fail(EngineClosed("the engine was closed"))
        if self._process.exclusive:
            await self._process.close()
            return
        self._process.detach(number)
        if running:
            await self._process.unload(number)

    def _lose_loop(self) -> None:
        """Ends the engine without its event loop, which has ended."""
        self._process.kill()
        self._process = EngineProcess(self.config.load_format, exclusive=True)
        self._number, self._death = None, EngineDead("the engine was closed")

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise ChairliftError(
                "an AsyncEngine answers only in the event loop that started it: use it within one asyncio.run, or start another one here"
            )

    def forget_tokenizer(self) -> None:
        """Frees the tokenizer of a closed engine; the next start reads it again. It takes some 100 MB for a large vocabulary."""
        self._tokenizer = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        scheduling: Scheduling | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers one conversation: see `LLM.chat`. Yields increments as `generate` does; the last of each answer has its tool calls."""
        from chairlift.engine.chat import Chat  # imports pydantic

        self.check_ready()
        options = ChatOptions(tools, tool_choice, chat_template_kwargs, add_generation_prompt, continue_final_message)
        params = sampling(params, sampling_params) or self.default_params()
        chat = await asyncio.to_thread(Chat, self.tokenizer, self.info, messages, params, options)
        scheduling = chat.scheduling(scheduling or Scheduling())
        async with aclosing(self.generate(chat.prompt, chat.params, scheduling, request_id=request_id)) as outputs:
            async for output in outputs:
                yield chat.separate(output)

    async def load_lora_adapter(self, name: str, path: str) -> None:
        """Loads the LoRA adapter `path`, a directory or a GGUF file, for requests with `SamplingParams(lora=name)`. Needs `enable_lora`.

        Raises InvalidRequest if the name is in use, InvalidSetting for its rank, and UnsupportedModel for unusable files.
        """
        path = os.path.abspath(path)
        self.check_ready()
        self.digests[name] = await self._change_adapter(partial(LoadAdapter, name=name, path=path))
        self.adapters[name] = path

    async def unload_lora_adapter(self, name: str) -> None:
        """Frees an adapter's memory. Raises InvalidRequest if it is not loaded, or while requests use it."""
        self.check_ready()
        await self._change_adapter(partial(UnloadAdapter, name=name))
        self.adapters.pop(name, None)

    async def _change_adapter(self, question: Callable[[int], Frame]) -> bytes:
        reply: AdapterChanged = await self._questions.ask(question)
        if reply.error is not None:
            kind = getattr(errors, reply.error)
            raise kind(reply.message, param="lora_name", code=reply.code) if kind is InvalidRequest else kind(reply.message)
        return reply.digest

    async def _reload_adapters(self, loaded: dict[str, str]) -> None:
        """Loads adapters into a restarted engine, which has `loaded`, until it has those of the others, which may change meanwhile.

        It serves without those that cannot be read any more.
        """
        while loaded != self.adapters:
            if gone := loaded.items() - self.adapters.items():
                name, path = min(gone)
                await self._change_adapter(partial(UnloadAdapter, name=name))
                del loaded[name]
                continue
            name, path = min(self.adapters.items() - loaded.items())
            try:
                self.digests[name] = await self._change_adapter(partial(LoadAdapter, name=name, path=path))
                loaded[name] = path
            except EngineDead:
                raise
            except ChairliftError as error:
                if self._process.joined is not None:
                    raise  # the other engines have it
                if self.adapters.get(name) == path:
                    del self.adapters[name]
                log.error("adapter %s cannot be loaded again: %s", name, error)

    def move_requests(self) -> None:
        """Ends all open requests with RequestMoved, so that another engine goes on with them."""
        for stream in set(self._streams.values()):
            self._end(stream, RequestMoved("the engine will be restarted"))

    async def explain(self, request_id: str) -> list[Timeline]:
        """The timelines of a request's sequences, also while it runs; empty if the request is unknown."""
        self.check_ready()
        remembered = self._remembered.get(request_id)
        return [] if remembered is None else [*remembered.ended, *await self.explain_sequences(remembered.tags)]

    async def explain_sequences(self, tags: Sequence[int]) -> list[Timeline]:
        """The timelines of these tags; unknown tags are left out."""
        timelines: list[Timeline] = []
        for start in range(0, len(tags), EXPLAINED_AT_ONCE):
            timelines += await self._ask(partial(Explain, tags=list(tags[start : start + EXPLAINED_AT_ONCE])))
        return timelines

    async def take_snapshot(self) -> EngineSnapshot:
        """The state of the engine, with the ids of its requests."""
        snapshot: EngineSnapshot = await self._ask(SnapshotRequest)
        streams = {one["tag"]: self._streams.get(one["tag"]) for one in [*snapshot["running"], *snapshot["waiting"]]}
        return {**snapshot, "names": [(tag, stream.request_id) for tag, stream in streams.items() if stream is not None]}

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
        self.check_ready()
        return await self._questions.ask(question)

    def check_ready(self) -> None:
        """Raises EngineDead unless requests can run, and ChairliftError in another event loop than that of `start`."""
        if self._death is not None:
            raise EngineDead(str(self._death))
        if not self._started:
            raise EngineDead("the engine is not ready yet")
        self._check_loop()

    def _check_open(self) -> int:
        """Returns the engine's number in the process. Raises EngineClosed if `close` was called after `start`."""
        if self._closed or self._number is None:
            raise EngineClosed("the engine was closed")
        return self._number

    def _next_journal(self) -> str | None:
        """The journal's path. An engine gets a new file if one has started before."""
        return f"{self.config.journal}.{self._journals}" if self.config.journal and self._journals else self.config.journal

    def tell(self, frame: Frame) -> None:
        """Sends a frame that the next engine does not need, if this one is ready."""
        if self.ready:
            self._write(frame)

    async def _add(self, request: EngineRequest) -> None:
        self._write(Add(request.tag, request.pack()))
        await self._process.drain()

    def _abort(self, frame: Abort) -> None:
        if self.alive:
            self._write(frame)

    def _write(self, frame: Frame) -> None:
        self._process.write(self._check_open(), frame)

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
                self._deliver(frame)
            case Rejected():
                self._reject(frame)
            case Explained():
                self._questions.answer(frame.ask, [Timeline.read(timeline) for timeline in frame.timelines])
            case AdapterChanged():
                self._questions.answer(frame.ask, frame)
            case Snapshot():
                self._stats = dataclasses.replace(self._stats, **frame.snapshot["stats"])
                self._questions.answer(frame.ask, frame.snapshot)
            case Phase():
                log.info("phase %s %.2f s", frame.name, frame.seconds)
                self._phases[frame.name] = frame.seconds
            case Ready():
                self._info = EngineInfo.unpack(frame.info)
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
