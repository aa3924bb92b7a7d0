"""The engines of a process, which take turns: one thread runs their steps, and the arbiter chooses whose step is next."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from chairlift import _core
from chairlift.config import EngineConfig
from chairlift.engine import clock
from chairlift.engine.exit_watch import start_sentinels
from chairlift.engine.frames import BadFrame, Failed, Frame, Load, Phase, Ready, ServiceShared, ShareService, Stop, Unload, Unloaded
from chairlift.engine.hosted_engine import HostedEngine, Task
from chairlift.engine.kv_sharing import KvSharing
from chairlift.engine.stats import Stats
from chairlift.engine.tenant_service import TenantService
from chairlift.engine.watchdog import CHECK_SECONDS, IDLE, Watchdog
from chairlift.errors import ChairliftError, InvalidSetting
from chairlift.trim import trim

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

log = logging.getLogger("chairlift")

SAVE_SECONDS = 3.0
"""Most seconds that a clean stop spends on writing KV to disk. The parent kills the process after five."""
EngineMaker = Callable[[EngineConfig, Callable[[str, float], None], bytes], "Engine"]
Send = Callable[..., None]
"""Sends a frame from an engine of this number: `send(frame, number, timeout=...)`."""


Received = tuple[int, Frame | Task] | Task | BadFrame
"""What the loop handles between two steps: a frame or a task with the number of its engine, or a task of the loop's own."""
Inbox = SimpleQueue[Received]


class StepLoop:
    """Runs the engines of a process until the parent says stop.

    While there are engines, others are loaded and unloaded on a second thread, one at a time.
    """

    def __init__(self, inbox: Inbox, send: Send, make: EngineMaker) -> None:
        self._inbox = inbox
        self._send = send
        self._make = make
        self._arbiter = _core.Arbiter()
        self._tenants = TenantService()
        self._kv = KvSharing()
        self._engines: dict[int, HostedEngine] = {}
        self._loading: dict[int, Load] = {}
        self._current: Engine | None = None  # whose stage is the process's
        self._first_step = 0.0
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._last_job: Future[None] | None = None
        self._watchdog: Watchdog | None = None

    def run(self, first: Received) -> None:
        """Handles `first` and what the inbox has, and runs steps. Raises BadFrame, and what a device's step raises."""
        try:
            going = self._handle(first)
            while going and self._take_frames():
                self._step()
            for hosted in self._engines.values():
                hosted.engine.save_prefixes(SAVE_SECONDS / len(self._engines))
        finally:
            for hosted in self._engines.values():
                hosted.close()

    @property
    def stage(self) -> tuple[str, float]:
        """The current stage and its start, for the watchdog."""
        current = self._current
        return (IDLE, 0.0) if current is None else current.stage

    @property
    def progress(self) -> int:
        """A number that changes while the current engine's step computes, for the watchdog."""
        current = self._current
        return 0 if current is None else current.runner.progress

    @property
    def first_step(self) -> float:
        """The expected duration of the current engine's first step in seconds."""
        return self._first_step

    def stats(self) -> Stats:
        """The current engine's counters."""
        current = self._current
        return Stats() if current is None else current.stats()

    def _set_stage(self, name: str) -> None:
        if self._current is not None:
            self._current.stage = name, time.monotonic()

    def _take_frames(self) -> bool:
        """Handles all frames in the inbox; False if the parent says stop.

        If all engines are idle, first waits for a frame or for the next wake-up.
        """
        block = not any(hosted.busy for hosted in self._engines.values())
        timeout = None
        if block and (times := [hosted.wakes_at for hosted in self._engines.values() if hosted.wakes_at is not None]):
            timeout = max(0.0, min(times) - time.monotonic())
        self._set_stage(IDLE if block else "intake")
        while True:
            try:
                received = self._inbox.get(block, timeout)
            except Empty:
                break
            if block:
                self._set_stage("intake")
            block = False
            if not self._handle(received):
                return False
        self._wake()
        return True

    def _handle(self, received: Received) -> bool:
        """Handles what was received; False if the parent says stop. Raises BadFrame."""
        if isinstance(received, BadFrame):
            raise received
        if not isinstance(received, tuple):
            received()
            return True
        number, frame = received
        match frame:
            case Stop():
                return False
            case ShareService(external):
                service = self._tenants.exchange(self._live_engines(), external)
                self._send(ServiceShared(service), number)
            case Load():
                self._loading[number] = frame
                self._run_job(partial(self._load, number, frame))
            case Unload():
                if self._loading.pop(number, None) is None:  # otherwise it ends as soon as it is loaded
                    self._retire(number)
            case _:
                # A frame may be late for an engine that has ended.
                if (hosted := self._engines.get(number)) is not None:
                    hosted.handle(frame)
                    self._ready(number, hosted)
        return True

    def _wake(self) -> None:
        """Makes the idle engines busy whose time has come."""
        for number, hosted in self._engines.items():
            if not hosted.busy and hosted.wakes_at is not None and hosted.wakes_at <= time.monotonic():
                self._ready(number, hosted)

    def _ready(self, number: int, hosted: HostedEngine) -> None:
        hosted.busy = True
        self._arbiter.ready(number, clock.now())

    def _step(self) -> None:
        """Runs the next step, if an engine is busy. If it fails, only its engine ends."""
        began = clock.now()
        self._predict()
        number = self._arbiter.choose(began)
        if number is None:
            return
        hosted = self._engines[number]
        self._current, self._first_step = hosted.engine, hosted.first_step
        failure = None
        if len(self._engines) > 1:
            self._kv.divide()
        try:
            hosted.step()
        except (BrokenPipeError, ConnectionResetError):
            raise  # the parent has exited
        except BaseException as error:  # a panic of the core is not an Exception
            if hosted.engine.runner.overlaps:
                raise  # the device's context may be lost for all
            failure = failed(error)
        if failure is not None:  # the error, which refers to the engine, is gone
            self._send(failure, number)
            self._retire(number, reply=False)
            return
        ended = clock.now()
        self._arbiter.charge(number, ended - began, ended)
        if not hosted.busy:
            self._arbiter.idle(number)
        if len(self._engines) > 1:
            self._tenants.share(self._live_engines(), ended)

    def _predict(self) -> None:
        """Tells the arbiter how long the next steps would take, if it has a choice."""
        busy = [(number, hosted) for number, hosted in self._engines.items() if hosted.busy]
        if len(busy) > 1:
            for number, hosted in busy:
                if (step := hosted.engine.next_step()) is not None:
                    self._arbiter.expect(number, *step)

    def _live_engines(self) -> list[Engine]:
        return [hosted.engine for hosted in self._engines.values()]

    def _run_job(self, job: Callable[[], None]) -> None:
        """Runs a job on the second thread if there are engines that must go on, else here. Jobs run in order."""
        if self._engines:
            self._last_job = self._jobs.submit(job)
            return
        if self._last_job is not None:
            wait([self._last_job])
        job()

    def _load(self, number: int, load: Load) -> None:
        phases: dict[str, float] = {}

        def report(name: str, seconds: float) -> None:
            phases[name] = seconds
            self._send(Phase(name, seconds), number)

        try:
            # A first prompt may take longer than the warm-up, but is expected to take less than the watchdog's STUCK_STEPS times as long.
            engine = self._make(EngineConfig(**load.settings), report, load.hash_key)
            self._inbox.put(partial(self._add, number, engine, phases.get("warm-up", 0.0)))
        except BaseException as error:
            self._inbox.put(partial(self._not_loaded, number, error))

    def _not_loaded(self, number: int, error: BaseException) -> None:
        """Reports why an engine could not be loaded, unless it was unloaded meanwhile."""
        unloaded = self._loading.pop(number, None) is None
        self._send(Unloaded() if unloaded else failed(error), number)

    def _add(self, number: int, engine: Engine, first_step: float) -> None:
        """Begins to run a loaded engine."""
        send = partial(self._send, engine=number)
        hosted = HostedEngine(engine, send, lambda task: self._inbox.put((number, task)), first_step)
        self._engines[number] = hosted
        load = self._loading.pop(number, None)
        if load is None:
            self._retire(number)
            return
        try:
            self._kv.add(number, hosted.engine)
        except InvalidSetting as error:
            self._send(failed(error), number)
            self._retire(number, reply=False)
            return
        self._arbiter.add(number, weight=load.weight, priority=load.priority, itl=load.itl)
        self._ready(number, hosted)
        hosted.engine.stage = IDLE, time.monotonic()
        self._send(Ready(hosted.engine.info.pack(), [] if self._watchdog else start_sentinels()), number)
        if self._watchdog is None:
            self._watchdog = Watchdog(self, partial(self._send, timeout=CHECK_SECONDS))
            self._watchdog.start()

    def _retire(self, number: int, *, reply: bool = True) -> None:
        """Ends an engine and frees its memory; with `reply`, reports that."""
        self._arbiter.remove(number)
        self._kv.remove(number)
        hosted = self._engines.pop(number, None)
        if hosted is not None and self._current is hosted.engine:
            self._current = None
        self._run_job(partial(self._release, number, hosted, reply))

    def _release(self, number: int, hosted: HostedEngine | None, reply: bool) -> None:
        try:
            if hosted is not None:
                if reply:  # otherwise it has failed
                    hosted.engine.save_prefixes(SAVE_SECONDS)
                hosted.close()
        except Exception:
            log.exception("an engine could not be closed")
        gc.collect()
        trim()
        if reply:
            self._send(Unloaded(), number)


def failed(error: BaseException) -> Failed:
    """Describes an error to the parent. Logs its traceback unless it is expected."""
    if not isinstance(error, ChairliftError):
        log.error("the engine failed", exc_info=error)
    return Failed(type(error).__name__, str(error) or repr(error))
