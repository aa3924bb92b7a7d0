"""The engine's own process: `python -m chairlift.engine.process FD`, where FD is one end of a socket pair.

Three threads work: one reads the socket, one runs the engine, one is the watchdog. Two more wait forever, so that the parent learns of
their exit (`exit_watch`). The engine is imported while the parent locates the model, so this module's own imports must be fast.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.config import EngineConfig
from chairlift.engine.compiling import Compiling
from chairlift.engine.exit_watch import start_sentinels
from chairlift.engine.frames import (
    Abort,
    AdapterChanged,
    Add,
    BadFrame,
    Config,
    DropSequence,
    Explain,
    Explained,
    Fatal,
    ForkSequence,
    Frame,
    LoadAdapter,
    Phase,
    Ready,
    Rejected,
    ResumedChoice,
    SetPriority,
    Snapshot,
    SnapshotRequest,
    StepOutputs,
    Stop,
    UnloadAdapter,
    receive,
    send,
)
from chairlift.engine.watchdog import CHECK_SECONDS, IDLE, Watchdog
from chairlift.errors import ChairliftError, InvalidRequest, QueueFull
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.adapters import PackedAdapter
    from chairlift.grammar.grammars import Grammar

MIN_LOCATE_SECONDS = 0.005
"""Shorter waits for the model's directory are not reported as a phase."""
STATS_SECONDS, USAGE_SECONDS = 0.2, 1.0
"""Intervals at which counters, and those per tenant and class, are sent while the engine works."""
COOLING_SECONDS = 1.0
"""Interval at which they are sent by an idle engine until its saturation is 0."""


class EngineLike(Protocol):
    """The interface of an engine that this process runs; `chairlift.engine.loop.Engine` implements it."""

    facts: dict[str, Any]
    stage: tuple[str, float]
    """The current stage and its start on the monotonic clock. The engine sets it in a step, this process at other times."""

    def compile(self, params: SamplingParams) -> Future[Grammar] | None:
        """Starts compiling a request's grammar. Raises QueueFull."""

    def add(
        self,
        tag: int,
        prompt: Sequence[int],
        params: SamplingParams,
        scheduling: Scheduling,
        submitted: int | None,
        grammar: Future[Grammar] | None,
        spent: Mapping[str, int],
        resumed: Sequence[ResumedChoice],
        continues: tuple[int, int] | None,
    ) -> None:
        """Queues a request. Raises InvalidRequest or QueueFull."""

    def abort(self, tag: int, *, stopped: bool = False) -> bool:
        """Ends a sequence that was aborted or, if `stopped`, that a stop string has ended."""

    def read_adapter(self, path: str) -> PackedAdapter:
        """Reads an adapter. Called on another thread. Raises a ChairliftError."""

    def load_adapter(self, name: str, adapter: PackedAdapter) -> None:
        """Loads an adapter. Raises InvalidRequest."""

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Raises InvalidRequest."""

    def set_priority(self, tag: int, priority: int) -> None:
        """Moves a sequence to another class."""

    def fork_sequence(self, handle: int, forks: Sequence[int]) -> None:
        """Opens held sequences with the KV of another."""

    def drop_sequence(self, handle: int) -> None:
        """Drops a held sequence."""

    def step(self) -> StepOutputs | None:
        """Runs one step; None if there is nothing to run."""

    def wakes_in(self) -> float | None:
        """Seconds until a step may have work without a new request; None for never."""

    def explain(self, tag: int) -> dict[str, Any] | None:
        """The timeline of a sequence; None if it is unknown."""

    def snapshot(self) -> dict[str, Any]:
        """The scheduler's state, for dashboards."""

    def stats(self) -> dict[str, Any]:
        """The newest counters."""

    def usage(self) -> dict[str, Any]:
        """The newest counters of each tenant and class."""

    def close(self) -> None:
        """Flushes the journal."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """In the inbox: a request's grammar was compiled, or failed to, at `ended` (microseconds of the monotonic clock)."""

    tag: int
    grammar: Future[Grammar]
    ended: int


@dataclass(frozen=True, slots=True)
class _AdapterRead:
    """In the inbox: an adapter was read, or cannot be."""

    ask: int
    name: str
    adapter: PackedAdapter | Exception


Inbox = SimpleQueue[Frame | BadFrame | _Compiled | _AdapterRead]


EngineMaker = Callable[[EngineConfig, Callable[[str, float], None]], EngineLike]


def load(load_format: str = "auto") -> EngineMaker:
    """Imports the engine; with torch if a model is loaded and there is a CUDA driver."""
    from chairlift.engine.loop import Engine

    if load_format != "none":
        from chairlift.runner.build import import_backend

        import_backend()

    return Engine


def main(fd: int, load: Callable[[], EngineMaker] = load) -> int:
    """Runs an engine for the parent at the other end of socket `fd` until the parent stops it or exits. Returns the exit status."""
    began = time.perf_counter()
    # Ctrl-C and a service manager's SIGTERM reach the whole process group; only the parent handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    sock = socket.socket(fileno=fd)
    parent = _Parent(sock)
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_receive_frames, args=(sock, inbox), name="intake", daemon=True).start()
    try:
        make = load()
        parent.send(Phase("imports", time.perf_counter() - began))
        _run(parent, inbox, make)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the parent has exited
    except BaseException as error:  # a panic of the core is not an Exception
        if not isinstance(error, ChairliftError):
            traceback.print_exc()
        parent.send(Fatal(type(error).__name__, str(error) or repr(error)))
        return 1
    return 0


class _Parent:
    """The parent's end of the socket. Two threads send to it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, frame: Frame, timeout: float = -1) -> None:
        """Sends a frame, or drops it if the other thread is sending for longer than `timeout` seconds (-1: waits forever)."""
        if self._lock.acquire(timeout=timeout):
            try:
                send(self._sock, frame)
            finally:
                self._lock.release()


def _run(parent: _Parent, inbox: Inbox, make: EngineMaker) -> None:
    phases: dict[str, float] = {}

    def report(name: str, seconds: float) -> None:
        phases[name] = seconds
        parent.send(Phase(name, seconds))

    began = time.perf_counter()
    first = inbox.get()
    waited = time.perf_counter() - began
    if waited > MIN_LOCATE_SECONDS:
        report("locate", waited)
    if isinstance(first, Stop):
        return
    if not isinstance(first, Config):
        raise BadFrame(f"expected the settings first, got {first!r:.100}")
    engine = make(EngineConfig(**first.settings), report)
    try:
        engine.stage = IDLE, time.monotonic()
        parent.send(Ready(engine.facts, start_sentinels()))
        # The warm-up is two steps. A first prompt may be longer, but within the watchdog's STUCK_STEPS.
        Watchdog(engine, partial(parent.send, timeout=CHECK_SECONDS), first_step=phases.get("warm-up", 0.0) / 2).start()
        counters = Counters(engine)
        compiling = Compiling()
        while True:
            step = engine.step()
            engine.stage = "send", time.monotonic()
            # One frame for all requests. An idle engine sends an empty one with its counters.
            # If the parent does not read, the engine blocks here instead of buffering its output.
            if step is None:
                parent.send(StepOutputs(stats=counters.news(idle=True)))
            else:
                parent.send(replace(step, stats=counters.news(idle=False)))
            if not drain(parent, engine, inbox, compiling, idle=step is None, cooling=counters.cooling):
                return
    finally:
        engine.close()


class Counters:
    """Decides when to send the engine's counters: at intervals, and when it becomes idle."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._stats_due = self._usage_due = 0.0
        self.cooling = False
        """Whether an idle engine's saturation still decays."""

    def news(self, *, idle: bool) -> dict[str, Any]:
        """The counters to send now; empty if none are due."""
        news: dict[str, Any] = {}
        now = time.monotonic()
        if idle or now >= self._stats_due:
            self._stats_due = now + STATS_SECONDS
            news |= self._engine.stats()
            self.cooling = news.get("saturation", 0) > 0
        if idle or now >= self._usage_due:
            self._usage_due = now + USAGE_SECONDS
            news |= self._engine.usage()
        return news


def drain(parent: _Parent, engine: EngineLike, inbox: Inbox, compiling: Compiling, *, idle: bool, cooling: bool = False) -> bool:
    """Handles all frames in the inbox; False if the parent says stop. If `idle`, first waits for a frame or for the engine's next wake-up.

    While `cooling` the wait is short, so that decaying counters are sent.
    """
    block, timeout = idle, engine.wakes_in() if idle else None
    if idle and cooling:
        timeout = COOLING_SECONDS if timeout is None else min(timeout, COOLING_SECONDS)
    engine.stage = IDLE if idle else "intake", time.monotonic()
    while True:
        try:
            frame = inbox.get(block, timeout)
        except Empty:
            return True
        if block:
            engine.stage = "intake", time.monotonic()
        block = False
        match frame:
            case Add():
                _add(parent, engine, frame, inbox, compiling)
            case _Compiled(tag, grammar, ended):
                if (request := compiling.end(tag, ended)) is not None:
                    _add(parent, engine, request, inbox, compiling, grammar)
            case Abort(tags, stopped):
                compiling.abort(tags)
                for tag in tags:
                    engine.abort(tag, stopped=stopped)
            case LoadAdapter():
                threading.Thread(target=_read_adapter, args=(engine, frame, inbox), name="adapter", daemon=True).start()
            case _AdapterRead(ask, name, adapter):
                parent.send(_adapter_changed(ask, partial(_load_adapter, engine, name, adapter)))
            case UnloadAdapter(ask, name):
                parent.send(_adapter_changed(ask, partial(engine.unload_adapter, name)))
            case SetPriority(tag, priority):
                engine.set_priority(tag, priority)
            case ForkSequence(handle, forks):
                engine.fork_sequence(handle, forks)
            case DropSequence(handle):
                engine.drop_sequence(handle)
            case Explain(ask, tags):
                parent.send(
                    Explained(ask, [timeline for tag in tags if (timeline := engine.explain(tag) or compiling.explain(tag)) is not None])
                )
            case SnapshotRequest(ask):
                parent.send(Snapshot(ask, engine.snapshot()))
            case Stop():
                return False
            case BadFrame():
                raise frame
            case _:
                raise BadFrame(f"unexpected frame for an engine: {frame!r:.100}")


def _add(
    parent: _Parent, engine: EngineLike, frame: Add, inbox: Inbox, compiling: Compiling, grammar: Future[Grammar] | None = None
) -> None:
    """Adds a request to the engine. If its grammar is not compiled yet, it waits in `compiling` and is added later."""
    try:
        params, scheduling = SamplingParams(**frame.params), Scheduling(**frame.scheduling)
        grammar = grammar or engine.compile(params)
        if grammar is not None and not grammar.done():
            compiling.begin(frame)
            grammar.add_done_callback(lambda grammar: inbox.put(_Compiled(frame.tag, grammar, time.monotonic_ns() // 1000)))
            return
        prompt, resumed = memoryview(frame.prompt).cast("i"), [ResumedChoice(*choice) for choice in frame.resumed]
        continues = None if frame.continues is None else (frame.continues[0], frame.continues[1])
        engine.add(frame.tag, prompt, params, scheduling, frame.submitted, grammar, frame.spent, resumed, continues)
    except InvalidRequest as error:
        parent.send(Rejected(frame.tag, "InvalidRequest", str(error), error.param, error.code))
    except QueueFull as error:
        parent.send(Rejected(frame.tag, "QueueFull", str(error), retry_after=error.retry_after))
    except Exception as error:  # an unexpected error fails only this request
        traceback.print_exc()
        parent.send(
            Rejected(frame.tag, "RequestFailed", f"the engine could not take the request ({type(error).__name__}); the log has more")
        )


def _read_adapter(engine: EngineLike, frame: LoadAdapter, inbox: Inbox) -> None:
    adapter: PackedAdapter | Exception
    try:
        adapter = engine.read_adapter(frame.path)
    except Exception as error:
        adapter = error
    inbox.put(_AdapterRead(frame.ask, frame.name, adapter))


def _load_adapter(engine: EngineLike, name: str, adapter: PackedAdapter | Exception) -> None:
    if isinstance(adapter, Exception):
        raise adapter
    engine.load_adapter(name, adapter)


def _adapter_changed(ask: int, change: Callable[[], None]) -> AdapterChanged:
    """Loads or unloads an adapter and returns the reply. No error ends the engine."""
    try:
        change()
    except ChairliftError as error:
        return AdapterChanged(ask, type(error).__name__, str(error), getattr(error, "code", None))
    except Exception as error:
        traceback.print_exc()
        return AdapterChanged(ask, "RequestFailed", f"the adapter cannot be used ({type(error).__name__}); the log has more")
    return AdapterChanged(ask)


def _receive_frames(sock: socket.socket, inbox: Inbox) -> None:
    """Moves frames from the socket to the queue. Ends the process at once, even during a step, when the parent exits."""
    with sock.makefile("rb") as file:
        try:
            while (frame := receive(file)) is not None:
                inbox.put(frame)
        except BadFrame as error:
            inbox.put(error)
            return
        except OSError:
            pass  # a connection reset
    os._exit(1)


def _die_with_parent() -> None:
    """Lets Linux kill this process when the thread that started it ends, because a blocked process does not see the socket close."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    status = main(int(sys.argv[1]), partial(load, sys.argv[2]))
    sys.stderr.flush()
    os._exit(status)  # nothing is left to save, and torch's exit handlers are slow
