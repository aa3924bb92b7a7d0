"""The engines' process: `python -m chairlift.engine.process FD FORMAT [joined] [SATURATION]`.

FD is one end of a socket pair, or of a connection to another machine's server: then its standard input has the `JoinSettings`.

Three threads work: one reads the socket, one runs the steps, one is the watchdog. Another loads engines beside those that run, and two
wait forever, so that the parent learns of their exit (`exit_watch`). The engine is imported while the parent locates the model, so this
module's own imports must be fast.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from chairlift.child_process import ignore_stops
from chairlift.engine.frames import Fatal, Leaving, Phase
from chairlift.engine.join_settings import JoinSettings, read_join_settings
from chairlift.engine.parent import Parent
from chairlift.engine.process_signals import LEAVE, end_with_parent
from chairlift.engine.step_loop import EngineMaker, Inbox, StepLoop
from chairlift.errors import ChairliftError
from chairlift.process_log import write_log_as_parent

log = logging.getLogger("chairlift")

MIN_LOCATE_SECONDS = 0.005
"""Shorter waits for the model's directory are not reported as a phase."""


def more_arguments(arguments: list[str]) -> tuple[int | None, JoinSettings | None]:
    """The last arguments of `main`, from those of the command line. Raises EngineDead if the process that joined has ended."""
    joined = read_join_settings(sys.stdin.buffer) if JoinSettings.argument in arguments else None
    return next((int(one) for one in arguments if one != JoinSettings.argument), None), joined


def load(load_format: str = "auto") -> EngineMaker:
    """Imports the engine; with torch if a model is loaded and there is a CUDA driver."""
    from chairlift.engine.engine import Engine

    if load_format != "none":
        from chairlift.runner.build import import_backend

        import_backend()

    return Engine


def main(fd: int, load: Callable[[], EngineMaker] = load, saturation: int | None = None, joined: JoinSettings | None = None) -> int:
    """Runs engines for the parent at the other end of socket `fd` until the parent stops it or exits. Returns the exit status.

    `saturation` is an open file that always has the engine's saturation, for a parent to which the engine does not send its frames. With
    `joined` the socket's other end is a server on another machine.
    """
    began = time.perf_counter()
    ignore_stops()
    write_log_as_parent()
    end_with_parent()  # a blocked process does not see the socket close
    sock = socket.socket(fileno=fd)
    parent = Parent(sock, saturation, joined)
    # The main thread, which handles signals, may just be sending: another thread waits for its turn.
    signal.signal(LEAVE, lambda *_: threading.Thread(target=parent.try_send, args=(Leaving(),), daemon=True).start())
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=parent.receive_into, args=(inbox,), name="intake", daemon=True).start()
    try:
        gc.disable()  # what is imported lasts, and need not be examined
        make = load()
        gc.freeze()
        gc.enable()
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
            log.exception("the engine's process ends")
        elif joined is not None:  # the server logs it, on its machine
            log.error("the engine ends: %s", error)
        parent.send(Fatal(type(error).__name__, str(error) or repr(error)))
        return 1
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]), partial(load, sys.argv[2]), *more_arguments(sys.argv[3:]))
    sys.stderr.flush()
    os._exit(status)  # nothing is left to save, and torch's exit handlers are slow
