"""The engine's own process: `python -m chairlift.engine.process FD`, where FD is one end of a socket pair.

Three threads work: one takes frames from the socket and watches for its end, one runs the engine, and one watches over that. Two more
wait for ever, so that the parent learns of their exit (`exit_watch`). Torch is imported while the parent still looks for the model,
so what stands above `main` must be quick to import.
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
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.config import EngineConfig
from chairlift.engine.compiling import Compiling
from chairlift.engine.exit_watch import start_sentinels
from chairlift.engine.frames import (
    Abort,
    Add,
    BadFrame,
    Config,
    Explain,
    Explained,
    Fatal,
    Frame,
    Phase,
    Ready,
    Rejected,
    Snapshot,
    SnapshotRequest,
    Step,
    Stop,
    receive,
    send,
)
from chairlift.engine.watchdog import IDLE, LOOK, Watchdog
from chairlift.errors import ChairliftError, InvalidRequest, QueueFull
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.request import Report
    from chairlift.grammar.grammars import Grammar

LONGEST_UNSAID_WAIT = 0.005
"""Seconds of waiting for the model's directory that are not worth a line in the log."""
STATS_SECONDS, USAGE_SECONDS = 0.2, 1.0
"""How often the parent hears of the counters, and of those for each tenant and class, while the engine works."""
COOLING_SECONDS = 1.0
"""How often it hears of them after that, until the last ten seconds were quiet."""


class EngineLike(Protocol):
    """What the process needs of an engine; `chairlift.engine.loop.Engine` has it."""

    facts: dict[str, Any]
    stage: tuple[str, float]
    """What it is doing and since when, on the monotonic clock: it says so in a step, this process at other times."""

    def compile(self, params: SamplingParams) -> Future[Grammar] | None:
        """The grammar that a request waits for; raises QueueFull."""

    def add(
        self,
        tag: int,
        prompt: Sequence[int],
        params: SamplingParams,
        scheduling: Scheduling,
        submitted: int | None,
        grammar: Future[Grammar] | None,
        spent: Mapping[str, int],
    ) -> None:
        """Takes a request; raises InvalidRequest or QueueFull."""

    def abort(self, tag: int, *, stopped: bool = False) -> bool:
        """Ends a request, whose caller left or, if `stopped`, has what it wanted."""

    def step(self) -> Report | None:
        """Runs one step; None when there is nothing to run."""

    def wakes_in(self) -> float | None:
        """Seconds after which a step may give something though nothing came; None: never."""

    def explain(self, tag: int) -> dict[str, Any] | None:
        """What became of a sequence's time; None if it is not remembered."""

    def look(self) -> dict[str, Any]:
        """What a dashboard shows of the scheduler."""

    def stats(self) -> dict[str, Any]:
        """The newest counters."""

    def usage(self) -> dict[str, Any]:
        """The newest counters of each tenant and class."""

    def close(self) -> None:
        """Writes out what must not be lost."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """In the inbox: a request's grammar is there, or known to be none, since `ended` (microseconds of the monotonic clock)."""

    tag: int
    grammar: Future[Grammar]
    ended: int


Inbox = SimpleQueue[Frame | BadFrame | _Compiled]


EngineMaker = Callable[[EngineConfig, Callable[[str, float], None]], EngineLike]


def load(load_format: str = "auto") -> EngineMaker:
    """Imports the engine, and torch with it unless there will be no model."""
    from chairlift.engine.loop import Engine

    if load_format != "none":
        import chairlift.runner.runner  # noqa: F401

    return Engine


def main(fd: int, load: Callable[[], EngineMaker] = load) -> int:
    """Runs an engine for the parent at the other end of socket `fd` until it says stop or goes; returns the exit status."""
    began = time.perf_counter()
    # Ctrl-C in a terminal and a service's SIGTERM reach the whole group: the parent decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    sock = socket.socket(fileno=fd)
    parent = _Parent(sock)
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_take_in, args=(sock, inbox), name="intake", daemon=True).start()
    try:
        make = load()
        parent.tell(Phase("imports", time.perf_counter() - began))
        _run(parent, inbox, make)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # nobody is left to tell
    except BaseException as error:  # a panic of the core is no Exception
        if not isinstance(error, ChairliftError):
            traceback.print_exc()
        parent.tell(Fatal(type(error).__name__, str(error) or repr(error)))
        return 1
    return 0


class _Parent:
    """The other end of the socket, to which two threads speak."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def tell(self, frame: Frame, patience: float = -1) -> None:
        """Sends a frame, or drops it if the other thread is at it for longer than `patience` seconds (-1: never)."""
        if self._lock.acquire(timeout=patience):
            try:
                send(self._sock, frame)
            finally:
                self._lock.release()


def _run(parent: _Parent, inbox: Inbox, make: EngineMaker) -> None:
    phases: dict[str, float] = {}

    def report(name: str, seconds: float) -> None:
        phases[name] = seconds
        parent.tell(Phase(name, seconds))

    began = time.perf_counter()
    first = inbox.get()
    waited = time.perf_counter() - began
    if waited > LONGEST_UNSAID_WAIT:
        report("locate", waited)
    if isinstance(first, Stop):
        return
    if not isinstance(first, Config):
        raise BadFrame(f"expected the settings first, got {first!r:.100}")
    engine = make(EngineConfig(**first.settings), report)
    try:
        engine.stage = IDLE, time.monotonic()
        parent.tell(Ready(engine.facts, start_sentinels()))
        # The warm-up is two steps. A prompt's first may have more tokens, but not as many times as the watchdog has patience.
        Watchdog(engine, partial(parent.tell, patience=LOOK), first=phases.get("warm-up", 0.0) / 2).start()
        counters = _Counters(engine)
        compiling = Compiling()
        while True:
            step = engine.step()
            engine.stage = "send", time.monotonic()
            # One frame for all requests; with nothing to run an empty one, so that the counters show the quiet too.
            # A parent that does not read blocks the engine here, rather than letting its answers pile up.
            if step is None:
                parent.tell(Step(stats=counters.news(idle=True)))
            else:
                news = counters.news(idle=False)
                arrays = step.tags, step.tokens, step.finishes, step.logprobs
                parent.tell(Step(*arrays, step.started, step.ended, news, step.details, step.prompts, step.starved))
            if not _drain(parent, engine, inbox, compiling, idle=step is None, cooling=counters.cooling):
                return
    finally:
        engine.close()


class _Counters:
    """The engine's counters, as often as they are worth sending: now and then, and when it goes idle."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._stats_due = self._usage_due = 0.0
        self.cooling = False
        """Whether an idle engine's counters change with time: what it did counts less and less."""

    def news(self, *, idle: bool) -> dict[str, Any]:
        """What is to be told now; empty for nothing."""
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


def _drain(parent: _Parent, engine: EngineLike, inbox: Inbox, compiling: Compiling, *, idle: bool, cooling: bool = False) -> bool:
    """Carries out every frame that has come, if `idle` after waiting for one or for the engine's time; False when told to stop.

    While `cooling` the wait is short, so that the parent hears of counters that change with time.
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
            case Explain(ask, tags):
                parent.tell(
                    Explained(ask, [ledger for tag in tags if (ledger := engine.explain(tag) or compiling.explain(tag)) is not None])
                )
            case SnapshotRequest(ask):
                parent.tell(Snapshot(ask, engine.look()))
            case Stop():
                return False
            case BadFrame():
                raise frame
            case _:
                raise BadFrame(f"an engine takes no such frame: {frame!r:.100}")


def _add(
    parent: _Parent, engine: EngineLike, frame: Add, inbox: Inbox, compiling: Compiling, grammar: Future[Grammar] | None = None
) -> None:
    """Gives the engine a request, or puts it among `compiling` until its grammar is there and it comes in again."""
    try:
        params, scheduling = SamplingParams(**frame.params), Scheduling(**frame.scheduling)
        grammar = grammar or engine.compile(params)
        if grammar is not None and not grammar.done():
            compiling.begin(frame)
            grammar.add_done_callback(lambda grammar: inbox.put(_Compiled(frame.tag, grammar, time.monotonic_ns() // 1000)))
            return
        engine.add(frame.tag, memoryview(frame.prompt).cast("i"), params, scheduling, frame.submitted, grammar, frame.spent)
    except InvalidRequest as error:
        parent.tell(Rejected(frame.tag, "InvalidRequest", str(error), error.param, error.code))
    except QueueFull as error:
        parent.tell(Rejected(frame.tag, "QueueFull", str(error), retry_after=error.retry_after))
    except Exception as error:  # whatever is wrong with one request must not cost the others theirs
        traceback.print_exc()
        parent.tell(
            Rejected(frame.tag, "RequestFailed", f"the engine could not take the request ({type(error).__name__}); the log has more")
        )


def _take_in(sock: socket.socket, inbox: Inbox) -> None:
    """Moves frames from the socket to the queue, and ends the process at once, in whatever step it is, when the parent has gone."""
    with sock.makefile("rb") as file:
        try:
            while (frame := receive(file)) is not None:
                inbox.put(frame)
        except BadFrame as error:
            inbox.put(error)
            return
        except OSError:
            pass  # a reset is an end too
    os._exit(1)


def _die_with_parent() -> None:
    """Has Linux kill this process when the thread that started it ends: the socket's end is not seen by a thread that can't run."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    status = main(int(sys.argv[1]), partial(load, sys.argv[2]))
    sys.stderr.flush()
    os._exit(status)  # nothing is left to save, and torch's own goodbye takes a while
