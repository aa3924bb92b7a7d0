"""The engines' process: `python -m chairlift.engine.process FD FORMAT [SATURATION]`, where FD is one end of a socket pair.

Three threads work: one reads the socket, one runs the steps, one is the watchdog. Another loads engines beside those that run, and two
wait forever, so that the parent learns of their exit (`exit_watch`). The engine is imported while the parent locates the model, so this
module's own imports must be fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from chairlift.engine.frames import BadFrame, Fatal, Frame, Leaving, Phase, StepOutputs, receive, send
from chairlift.engine.gauge import write_gauge
from chairlift.engine.spawned_process import LEAVE
from chairlift.engine.step_loop import EngineMaker, Inbox, StepLoop
from chairlift.errors import ChairliftError

MIN_LOCATE_SECONDS = 0.005
"""Shorter waits for the model's directory are not reported as a phase."""


def load(load_format: str = "auto") -> EngineMaker:
    """Imports the engine; with torch if a model is loaded and there is a CUDA driver."""
    from chairlift.engine.loop import Engine

    if load_format != "none":
        from chairlift.runner.build import import_backend

        import_backend()

    return Engine


def main(fd: int, load: Callable[[], EngineMaker] = load, saturation: int | None = None) -> int:
    """Runs engines for the parent at the other end of socket `fd` until the parent stops it or exits. Returns the exit status.

    `saturation` is an open file that always has the engine's saturation, for a parent to which the engine does not send its frames.
    """
    began = time.perf_counter()
    # Ctrl-C and a service manager's SIGTERM reach the whole process group; only the parent handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    sock = socket.socket(fileno=fd)
    parent = _Parent(sock, saturation)
    # The main thread, which handles signals, may just be sending: another thread waits for its turn.
    signal.signal(LEAVE, lambda *_: threading.Thread(target=parent.try_send, args=(Leaving(),), daemon=True).start())
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_receive_frames, args=(sock, inbox), name="intake", daemon=True).start()
    try:
        make = load()
        parent.send(Phase("imports", time.perf_counter() - began))
        began = time.perf_counter()
        first = inbox.get()
        waited = time.perf_counter() - began
        if waited > MIN_LOCATE_SECONDS:
            parent.send(Phase("locate", waited))
        StepLoop(inbox, parent.send, make).run(first)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the parent has exited
    except BaseException as error:  # a panic of the core is not an Exception
        if not isinstance(error, ChairliftError):
            traceback.print_exc()
        parent.send(Fatal(type(error).__name__, str(error) or repr(error)))
        return 1
    return 0


class _Parent:
    """The parent's end of the socket. Three threads send to it."""

    def __init__(self, sock: socket.socket, saturation: int | None) -> None:
        self._sock = sock
        self._saturation = saturation
        self._lock = threading.Lock()

    def send(self, frame: Frame, engine: int = 0, timeout: float = -1) -> None:
        """Sends a frame of an engine, or drops it if other threads are sending for longer than `timeout` seconds (-1: waits forever)."""
        if self._lock.acquire(timeout=timeout):
            try:
                send(self._sock, frame, engine)
            finally:
                self._lock.release()
        if self._saturation is not None and isinstance(frame, StepOutputs) and "saturation" in frame.stats:
            write_gauge(self._saturation, frame.stats["saturation"])

    def try_send(self, frame: Frame) -> None:
        """Like `send`, but does nothing if the parent has exited."""
        with contextlib.suppress(OSError):
            self.send(frame)


def _receive_frames(sock: socket.socket, inbox: Inbox) -> None:
    """Moves frames from the socket to the queue. Ends the process at once, even during a step, when the parent exits."""
    with sock.makefile("rb") as file:
        try:
            while (received := receive(file)) is not None:
                inbox.put(received)
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
    status = main(int(sys.argv[1]), partial(load, sys.argv[2]), *map(int, sys.argv[3:]))
    sys.stderr.flush()
    os._exit(status)  # nothing is left to save, and torch's exit handlers are slow
