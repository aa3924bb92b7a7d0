"""The engine's own process: `python -m chairlift.engine.process FD`, where FD is one end of a socket pair.

Two threads: one takes frames from the socket and watches for its end, the other runs the engine. Torch is imported
while the parent still looks for the model, so what stands above `main` must be quick to import.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.config import EngineConfig
from chairlift.engine.protocol import (
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
    Step,
    Stop,
    receive,
    send,
)
from chairlift.errors import ChairliftError, InvalidRequest, QueueFull
from chairlift.sampling import SamplingParams
from chairlift.scheduling import Scheduling

if TYPE_CHECKING:
    from chairlift.engine.request import Report

LONGEST_UNSAID_WAIT = 0.005
"""Seconds of waiting for the model's directory that are not worth a line in the log."""
STATS_SECONDS, USAGE_SECONDS = 0.2, 1.0
"""How often the parent hears of the counters, and of those for each tenant and class, while the engine works."""


class EngineLike(Protocol):
    """What the process needs of an engine; `chairlift.engine.loop.Engine` has it."""

    facts: dict[str, Any]

    def add(self, tag: int, prompt: Sequence[int], params: SamplingParams, scheduling: Scheduling, arrived: int | None) -> None:
        """Takes a request; raises InvalidRequest or QueueFull."""

    def abort(self, tag: int, *, stopped: bool = False) -> bool:
        """Ends a request, whose caller left or, if `stopped`, has what it wanted."""

    def step(self) -> Report | None:
        """Runs one step; None when there is nothing to run."""

    def wakes_in(self) -> float | None:
        """Seconds after which a step may give something though nothing came; None: never."""

    def explain(self, tag: int) -> dict[str, Any] | None:
        """What became of a sequence's time; None if it is not remembered."""

    def stats(self) -> dict[str, Any]:
        """The newest counters."""

    def usage(self) -> dict[str, Any]:
        """The newest counters of each tenant and class."""

    def close(self) -> None:
        """Writes out what must not be lost."""


EngineMaker = Callable[[EngineConfig, Callable[[str, float], None]], EngineLike]


def load() -> EngineMaker:
    """Imports the engine, and torch with it."""
    from chairlift.engine.loop import Engine

    return Engine


def main(fd: int, load: Callable[[], EngineMaker] = load) -> int:
    """Runs an engine for the parent at the other end of socket `fd` until it says stop or goes; returns the exit status."""
    began = time.perf_counter()
    # Ctrl-C in a terminal and a service's SIGTERM reach the whole group: the parent decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    sock = socket.socket(fileno=fd)
    inbox: SimpleQueue[Frame | BadFrame] = SimpleQueue()
    threading.Thread(target=_take_in, args=(sock, inbox), name="intake", daemon=True).start()
    try:
        make = load()
        send(sock, Phase("imports", time.perf_counter() - began))
        _run(sock, inbox, make)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # nobody is left to tell
    except Exception as error:
        if not isinstance(error, ChairliftError):
            traceback.print_exc()
        send(sock, Fatal(type(error).__name__, str(error) or repr(error)))
        return 1
    return 0


def _run(sock: socket.socket, inbox: SimpleQueue[Frame | BadFrame], make: EngineMaker) -> None:
    def report(name: str, seconds: float) -> None:
        send(sock, Phase(name, seconds))

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
        send(sock, Ready(engine.facts))
        counters = _Counters(engine)
        while True:
            step = engine.step()
            # One frame for all requests; with nothing to run an empty one, so that the counters show the quiet too.
            # A parent that does not read blocks the engine here, rather than letting its answers pile up.
            if step is None:
                send(sock, Step(stats=counters.news(idle=True)))
            else:
                news = counters.news(idle=False)
                send(sock, Step(step.tags, step.tokens, step.finishes, step.logprobs, step.started, step.ended, news))
            if not _drain(sock, engine, inbox, idle=step is None):
                return
    finally:
        engine.close()


class _Counters:
    """The engine's counters, as often as they are worth sending: now and then, and when it goes idle."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._stats_due = self._usage_due = 0.0

    def news(self, *, idle: bool) -> dict[str, Any]:
        """What is to be told now; empty for nothing."""
        news: dict[str, Any] = {}
        now = time.monotonic()
        if idle or now >= self._stats_due:
            self._stats_due = now + STATS_SECONDS
            news |= self._engine.stats()
        if idle or now >= self._usage_due:
            self._usage_due = now + USAGE_SECONDS
            news |= self._engine.usage()
        return news


def _drain(sock: socket.socket, engine: EngineLike, inbox: SimpleQueue[Frame | BadFrame], *, idle: bool) -> bool:
    """Carries out every frame that has come, if `idle` after waiting for one or for the engine's time; False when told to stop."""
    block, timeout = idle, engine.wakes_in() if idle else None
    while True:
        try:
            frame = inbox.get(block, timeout)
        except Empty:
            return True
        block = False
        match frame:
            case Add():
                _add(sock, engine, frame)
            case Abort(tags, stopped):
                for tag in tags:
                    engine.abort(tag, stopped=stopped)
            case Explain(ask, tags):
                send(sock, Explained(ask, [ledger for tag in tags if (ledger := engine.explain(tag)) is not None]))
            case Stop():
                return False
            case BadFrame():
                raise frame
            case _:
                raise BadFrame(f"an engine takes no such frame: {frame!r:.100}")


def _add(sock: socket.socket, engine: EngineLike, frame: Add) -> None:
    try:
        params, scheduling = SamplingParams(**frame.params), Scheduling(**frame.scheduling)
        engine.add(frame.tag, memoryview(frame.prompt).cast("i"), params, scheduling, frame.arrived)
    except InvalidRequest as error:
        send(sock, Rejected(frame.tag, "InvalidRequest", str(error), error.param, error.code))
    except QueueFull as error:
        send(sock, Rejected(frame.tag, "QueueFull", str(error), retry_after=error.retry_after))
    except Exception as error:  # whatever is wrong with one request must not cost the others theirs
        traceback.print_exc()
        send(sock, Rejected(frame.tag, "RequestFailed", f"the engine could not take the request: {type(error).__name__}: {error}"))


def _take_in(sock: socket.socket, inbox: SimpleQueue[Frame | BadFrame]) -> None:
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
    status = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # nothing is left to save, and torch's own goodbye takes a while
