"""One engine of a process: its part of the frames, its steps and its counters."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.frames import (
    Abort,
    AdapterChanged,
    Add,
    Answering,
    BadFrame,
    DropSequence,
    Estimate,
    Explain,
    Explained,
    ForkSequence,
    Frame,
    LoadAdapter,
    NoteSession,
    Rejected,
    ServerRestarted,
    SetPriority,
    Snapshot,
    SnapshotRequest,
    StepOutputs,
    UnloadAdapter,
)
from chairlift.errors import ChairliftError, InvalidRequest, QueueFull

if TYPE_CHECKING:
    from chairlift.engine.engine import Engine

log = logging.getLogger("chairlift")

STATS_SECONDS, USAGE_SECONDS = 0.2, 1.0
"""Intervals at which counters, and those per tenant and class, are sent while the engine works."""
COOLING_SECONDS = 1.0
"""Interval at which they are sent by an idle engine until its saturation is 0."""


Task = Callable[[], None]
"""What another thread leaves to be done between two steps."""


class HostedEngine:
    """An engine, as its process runs it.

    `send` sends a frame to the parent. `put` passes a task of another thread to `handle`.
    """

    def __init__(self, engine: Engine, send: Callable[[Frame], None], put: Callable[[Task], None], first_step: float = 0.0) -> None:
        self.engine = engine
        self.first_step = first_step
        """The expected duration of the first step in seconds."""
        self.busy = True
        """Whether the next step may have work."""
        self.wakes_at: float | None = None
        """When an idle engine becomes busy by itself, on the monotonic clock; None for never."""
        self._send = send
        self._put = put
        self._counters = Counters(engine)

    def step(self) -> None:
        """Runs a step and sends its outputs, for all requests in one frame, if there are any. An idle engine sends its counters.

        Blocks while the parent does not read, instead of buffering outputs.
        """
        step = self.engine.step()
        self.engine.stage = "send", time.monotonic()
        self.busy = step is not None
        if stats := self._counters.news(idle=not self.busy and not self.engine.in_flight):
            step = replace(step or StepOutputs(), stats=stats)
        if step is not None and not step.empty:
            self._send(step)
        if self.busy:
            return
        wakes_in = self.engine.wakes_in()
        if self._counters.cooling:  # so that decaying counters are sent
            wakes_in = COOLING_SECONDS if wakes_in is None else min(wakes_in, COOLING_SECONDS)
        self.wakes_at = None if wakes_in is None else time.monotonic() + wakes_in

    def handle(self, frame: Frame | EngineRequest | Task) -> None:
        """Handles a frame or a task between two steps. Waits until a request of this process is prepared. Raises BadFrame."""
        match frame:
            case Add(tag, packed):
                on_prepared = partial(self._prepared, tag)
                self._handle_errors(tag, lambda: self.engine.add(EngineRequest.unpack(packed), on_prepared))
            case EngineRequest(tag):
                self._handle_errors(tag, partial(self.engine.add, frame))
            case Abort(tags, stopped):
                for tag in tags:
                    self.engine.abort(tag, stopped=stopped)
            case LoadAdapter():
                threading.Thread(target=self._read_adapter, args=(self.engine, frame), name="adapter", daemon=True).start()
            case UnloadAdapter(ask, name):
                self._change_adapter(ask, partial(self.engine.unload_adapter, name))
            case SetPriority(tag, priority):
                self.engine.set_priority(tag, priority)
            case Estimate() | Answering() | ServerRestarted():
                from chairlift.engine.estimated_engine import EstimatedEngine  # only such an engine's process has imported it

                if isinstance(self.engine, EstimatedEngine):
                    self.engine.learn(frame)
            case ForkSequence(handle, forks):
                self.engine.fork_sequence(handle, forks)
            case DropSequence(handle):
                self.engine.drop_sequence(handle)
            case NoteSession(tenant, session, event):
                self.engine.note_session(tenant, session, event)
            case Explain(ask, tags):
                self._send(Explained(ask, [timeline for tag in tags if (timeline := self.engine.explain(tag)) is not None]))
            case SnapshotRequest(ask):
                self._send(Snapshot(ask, self.engine.snapshot()))
            case Frame():
                raise BadFrame(f"unexpected frame for an engine: {frame!r:.100}")
            case task:
                task()

    def close(self) -> None:
        """Ends the engine and lets go of it."""
        try:
            self.engine.close()
        finally:
            del self.engine, self._counters

    def _prepared(self, tag: int, go_on: Callable[[], None]) -> None:
        self._put(partial(self._handle_errors, tag, go_on))

    def _handle_errors(self, tag: int, add: Callable[[], None]) -> None:
        """Adds the request `tag` or goes on with it, or rejects it. No error ends the engine."""
        try:
            add()
        except InvalidRequest as error:
            self._send(Rejected(tag, "InvalidRequest", str(error), error.param, error.code))
        except QueueFull as error:
            self._send(Rejected(tag, "QueueFull", str(error), retry_after=error.retry_after))
        except Exception as error:  # an unexpected error fails only this request
            log.exception("the engine could not take a request")
            message = f"the engine could not take the request ({type(error).__name__}); the log has more"
            self._send(Rejected(tag, "RequestFailed", message))

    def _read_adapter(self, engine: Engine, frame: LoadAdapter) -> None:
        """Reads an adapter, on another thread, to be loaded between two steps."""
        try:
            adapter = engine.read_adapter(frame.path)
        except Exception as error:
            self._put(partial(self._send, _adapter_error(frame.ask, error)))
        else:
            self._put(partial(self._change_adapter, frame.ask, partial(engine.load_adapter, frame.name, adapter), adapter.digest))

    def _change_adapter(self, ask: int, change: Callable[[], None], digest: bytes = b"") -> None:
        """Loads or unloads an adapter and replies, with the `digest` of its files. No error ends the engine."""
        try:
            change()
        except Exception as error:
            self._send(_adapter_error(ask, error))
        else:
            self._send(AdapterChanged(ask, digest=digest))


def _adapter_error(ask: int, error: Exception) -> AdapterChanged:
    """The reply for an adapter that cannot be loaded or unloaded."""
    if isinstance(error, ChairliftError):
        return AdapterChanged(ask, type(error).__name__, str(error), getattr(error, "code", None))
    log.error("an adapter cannot be used", exc_info=error)
    return AdapterChanged(ask, "RequestFailed", f"the adapter cannot be used ({type(error).__name__}); the log has more")


class Counters:
    """Decides when to send the engine's counters: at intervals, and when it becomes idle."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stats_due = self._usage_due = 0.0
        self.cooling = False
        """Whether an idle engine's saturation still decays."""

    def news(self, *, idle: bool) -> dict[str, Any]:
        """The fields of `Stats` to send now; empty if none are due."""
        news: dict[str, Any] = {}
        now = time.monotonic()
        if idle or now >= self._stats_due:
            self._stats_due = now + STATS_SECONDS
            stats = self._engine.stats()
            news |= stats.counters()
            self.cooling = stats.saturation > 0
        if idle or now >= self._usage_due:
            self._usage_due = now + USAGE_SECONDS
            news |= self._engine.usage()
        return news
