"""The engines that serve one model together: chooses one of them for each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from chairlift.engine.client import AsyncEngine
from chairlift.engine.engine_info import EngineInfo
from chairlift.engine.engine_request import shared_salt
from chairlift.engine.frames import DropSequence, ForkSequence, Frame
from chairlift.engine.model_client import ModelClient
from chairlift.engine.questions import Remembered
from chairlift.engine.replica import Replica
from chairlift.engine.replica_router import ReplicaRouter
from chairlift.engine.stats import Stats
from chairlift.errors import ChairliftError, EngineDead, InvalidRequest
from chairlift.outputs import RequestOutput, Timeline
from chairlift.trim import trim

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.engine.engine_process import EngineProcess
    from chairlift.engine.stream import Stream
    from chairlift.tokenizer import Tokenizer

ANSWER_SECONDS = 2.0
"""Seconds that each engine has to answer a question to all of them. One that hangs must not hang the others' answers."""


class ReplicatedEngine(ModelClient):
    """One model in one or several engines, each in a process of its own, for one event loop.

    It is used like an `AsyncEngine`. A request whose engine dies raises EngineDead, and can be run again at once while another engine is
    ready. A live sequence stays in its engine as long as that is ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        processes: Sequence[EngineProcess],
        *,
        weight: int = 1,
        equal_numerics: bool = True,
        routing: str | None = None,
    ) -> None:
        """Makes an engine in each of `processes`. `routing` chooses among them; without it there is always one.

        With `equal_numerics` an engine is refused if its fingerprint is not that of the engines that are ready.
        """
        super().__init__(config, processes[0].tags)
        self.adapters: dict[str, str] = dict(config.lora_modules or {})
        """The directories of the loaded LoRA adapters, by name."""
        self.on_end: Callable[[], None] | None = None
        """Called when an engine that was ready has died, before its requests fail."""
        self.new_counters: Callable[[Replica], AbstractContextManager[None]] = lambda replica: nullcontext()
        """Called when an engine's counters begin anew or are forgotten, which happens in the context."""
        self._weight, self._equal_numerics = weight, equal_numerics
        self._replicas: list[Replica] = []
        self._router = None if routing is None else ReplicaRouter(routing)
        self._restarts: dict[int, int] = {}  # by number, of engines that were removed
        self._homes: dict[int, Replica] = {}  # of live sequences, by handle
        self._ran_in: Remembered[Replica] = Remembered()
        for process in processes:
            self.add(process)

    def add(self, process: EngineProcess, config: EngineConfig | None = None) -> Replica:
        """Adds an engine in a process, with other settings if `config` is given. It is not started yet."""
        config = config or self.config
        numbers = {replica.number for replica in self._replicas}
        number = next(number for number in range(len(numbers) + 1) if number not in numbers)
        journal = f"{config.journal}.replica{number}" if config.journal and number else config.journal
        hash_key = b"" if self._router is None else self._router.hash_key
        engine = AsyncEngine(replace(config, journal=journal), process=process, weight=self._weight, hash_key=hash_key)
        engine.adapters = self.adapters
        replica = Replica(number, engine, self._started, process.joined.name if process.joined else None)
        replica.restarts = self._restarts.pop(number, 0)
        engine.on_end = lambda: self._ended(replica)
        engine.new_counters = lambda: self.new_counters(replica)
        if self._router is not None:
            engine.on_cache_change = partial(self._router.cache_changed, replica)
        self._replicas.append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Forgets an engine that has ended, which is not the first one."""
        with self.new_counters(replica):
            self._replicas.remove(replica)
        self._restarts[replica.number] = replica.restarts
        if self._router is not None:
            self._router.forget(replica)
        self._homes = {handle: home for handle, home in self._homes.items() if home is not replica}
        self._ran_in.forget(replica)

    @property
    def replicas(self) -> Sequence[Replica]:
        """All engines, also those that are not ready."""
        return self._replicas

    @property
    def alive(self) -> bool:
        """Whether an engine exists, starting or ready."""
        return any(replica.engine.alive for replica in self._replicas)

    @property
    def ready(self) -> bool:
        """Whether an engine takes requests."""
        return any(replica.ready for replica in self._replicas)

    @property
    def stuck(self) -> tuple[str, float] | None:
        """The stage in which an engine is stuck and the seconds since, if all that are ready are stuck; else None."""
        stages = [replica.engine.stuck for replica in self._replicas if replica.engine.ready]
        return stages[0] if stages and all(stages) else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. There is none before the first start is complete, and after `close` only with live sequences."""
        return self._known().engine.tokenizer

    def stats(self) -> Stats:
        """The newest counters of all engines as those of one: see `Stats.merged`."""
        return Stats.merged([*self.stats_by_engine().values()])

    def stats_by_engine(self) -> dict[int, Stats]:
        """The newest counters of each engine, by its number."""
        return {replica.number: replica.engine.stats() for replica in self._replicas}

    async def start(self, since: float | None = None) -> None:
        """Starts the first engine: see `AsyncEngine.start`."""
        await self._replicas[0].start(since)

    async def close(self) -> None:
        """Ends all engines. Open requests raise EngineClosed. May be called repeatedly.

        Frees the tokenizers, unless there are live sequences: these are read and appended to without an engine.
        """
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas))
        if not self._sequences:
            for replica in self._replicas:
                replica.engine.forget_tokenizer()
        await asyncio.to_thread(trim)

    async def load_lora_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter into all engines: see `AsyncEngine.load_lora_adapter`. If one refuses it, none has it."""
        first = self._ready_engines()[0]
        await first.load_lora_adapter(name, path)
        try:
            for engine in self._ready_engines():  # one that becomes ready later has loaded it itself
                if engine is not first:
                    await engine.load_lora_adapter(name, path)
        except ChairliftError:
            with suppress(ChairliftError):  # the first error says more
                await self.unload_lora_adapter(name)
            raise

    async def unload_lora_adapter(self, name: str) -> None:
        """Frees an adapter's memory in all engines. Raises InvalidRequest if none has loaded it, or while requests use it.

        After an error some engines may still have it. Its name stays known, so that it can be unloaded again.
        """
        path, found = self.adapters.get(name), False
        asked: list[AsyncEngine] = []
        errors: list[ChairliftError] = []
        while (engine := next((one for one in self._ready_engines() if one not in asked), None)) is not None:
            asked.append(engine)
            try:
                await engine.unload_lora_adapter(name)
                found = True
            except ChairliftError as error:
                errors.append(error)
            if path is not None:
                self.adapters[name] = path
        if refused := [error for error in errors if not (isinstance(error, InvalidRequest) and error.code == "adapter_not_found")]:
            raise refused[0]
        if self.adapters.pop(name, None) is None and not found:
            raise errors[0]

    def abort_dropped(self, tag: int) -> None:
        """Ends the request that continues a live sequence, because that was dropped."""
        for replica in self._replicas:
            replica.engine.abort_dropped(tag)

    def check_ready(self) -> None:
        """Raises EngineDead unless an engine takes requests."""
        self._ready_engines()[0].check_ready()

    def run(
        self,
        stream: Stream,
        *,
        request_id: str | None = None,
        on_start: Callable[[], None] | None = None,
        spent: Mapping[str, float] | None = None,
        session: str | None = None,
        tried: Collection[int] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request of `prepare` in one of the engines: see `AsyncEngine.run`. Raises EngineDead if none is ready.

        Requests of a tenant's `session` stay with one engine while its load allows it. Engines whose numbers are in `tried` are chosen
        only if no other is ready.
        """
        replica = self._choose(stream, session, tried)
        if request_id is not None:
            self._ran_in.add(request_id, replica)
        return replica.engine.run(stream, request_id=request_id, on_start=on_start, spent=spent)

    def ran_in(self, request_id: str) -> Replica | None:
        """The engine that runs or ran a request; None if it is unknown or ended too long ago."""
        return self._ran_in.get(request_id)

    async def explain(self, request_id: str) -> list[Timeline]:
        """The timelines of a request's sequences, also while it runs; empty if the request, or the engine that had it, is gone."""
        replica = self.ran_in(request_id)
        return [] if replica is None or not replica.engine.ready else await replica.engine.explain(request_id)

    async def explain_sequences(self, tags: Sequence[int]) -> list[Timeline]:
        """The timelines of these tags; unknown tags, and those of an engine that does not answer, are left out."""
        if not tags:
            return []
        questions = [asyncio.create_task(engine.explain_sequences(tags)) for engine in self._ready_engines()]
        answered, late = await asyncio.wait(questions, timeout=ANSWER_SECONDS)
        for question in late:
            question.cancel()
        return [timeline for question in answered if question.exception() is None for timeline in question.result()]

    def _choose(self, stream: Stream, session: str | None, tried: Collection[int]) -> Replica:
        """Chooses the engine for a request. A live sequence goes to the engine that has its KV."""
        # One that was dropped while the request was prepared has no home any more.
        handle = None if stream.sequence is None or stream.sequence.dropped else stream.sequence.handle
        if handle is not None and (home := self._homes.get(handle)) is not None and home.ready:
            return home
        ready = [replica for replica in self._replicas if replica.ready]
        if not ready:
            raise EngineDead("no engine of the model is ready")
        ready = [replica for replica in ready if replica.number not in tried] or ready
        moving = [replica for replica in ready if not replica.engine.stuck] or ready
        own = None if session is None else f"{stream.scheduling.tenant}\0{session}".encode()
        chosen = moving[0] if self._router is None else self._router.choose(moving, stream, self._salt(stream), own)
        if handle is not None:
            self._homes[handle] = chosen
        return chosen

    def _salt(self, stream: Stream) -> bytes:
        """The salt of the KV blocks that a request shares. An adapter that no engine knows has none of them."""
        name = stream.params.lora
        return shared_salt(stream.scheduling.cache_salt, None if name is None else self._known().engine.digests.get(name, name.encode()))

    def tell(self, frame: Frame) -> None:
        """Sends a frame about live sequences or sessions to all engines. Those that do not have the sequence or session ignore it."""
        if isinstance(frame, ForkSequence) and (home := self._homes.get(frame.handle)) is not None:
            self._homes.update(dict.fromkeys(frame.forks, home))
        elif isinstance(frame, DropSequence):
            self._homes.pop(frame.handle, None)
        for replica in self._replicas:
            replica.engine.tell(frame)

    def _started(self, replica: Replica) -> None:
        """Takes an engine that has been started. Raises EngineDead for one with other numerics, if that matters."""
        fingerprint = replica.engine.info.fingerprint
        others = [other for other in self._replicas if other is not replica and other.engine.ready]
        for other in others if self._equal_numerics else ():
            if other.engine.info.fingerprint != fingerprint:
                raise EngineDead(
                    f"replica {replica.number} has other numerics than replica {other.number}: other weights, dtypes, instructions or "
                    "another version (--resume any accepts it)"
                )
        if self._router is not None:
            self._router.forget(replica)  # its cache is empty
        self._info = EngineInfo.merged([one.engine.info for one in (*others, replica)])

    def _ended(self, replica: Replica) -> None:
        replica.restarts += 1
        if self.on_end is not None:
            self.on_end()

    def _known(self) -> Replica:
        """A replica that has been ready."""
        return next((replica for replica in self._replicas if replica.engine.info.model), self._replicas[0])

    def _ready_engines(self) -> list[AsyncEngine]:
        """The engines that can be asked, or the first, whose error says why not."""
        return [replica.engine for replica in self._replicas if replica.engine.ready] or [self._replicas[0].engine]
