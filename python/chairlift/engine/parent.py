"""The engines' process's end of its connection to the process that it runs engines for: the parent, or another machine's server."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading

from chairlift.engine.frames import AdapterChanged, BadFrame, Failed, Frame, Load, LoadAdapter, Pulse, StepOutputs, receive, send
from chairlift.engine.gauge import write_gauge
from chairlift.engine.join_settings import JoinSettings
from chairlift.engine.seal import Seal
from chairlift.engine.step_loop import Inbox
from chairlift.errors import ChairliftError

log = logging.getLogger("chairlift")


class Parent:
    """Sends frames from any thread, and receives them on one."""

    def __init__(self, sock: socket.socket, saturation: int | None = None, joined: JoinSettings | None = None) -> None:
        """`saturation` is an open file that gets the engine's saturation. With `joined` the other end is another machine's server."""
        self._sock = sock
        self._saturation = saturation
        self._files = None if joined is None else joined.files
        self._outgoing: Seal | None = None
        self._incoming: Seal | None = None
        if joined is not None:
            self._outgoing, self._incoming = joined.seals()
        self._lock = threading.Lock()

    def send(self, frame: Frame, engine: int = 0, timeout: float = -1) -> None:
        """Sends a frame of an engine, or drops it if other threads are sending for longer than `timeout` seconds (-1: waits forever)."""
        if self._lock.acquire(timeout=timeout):
            try:
                send(self._sock, frame, engine, self._outgoing)
            finally:
                self._lock.release()
        if self._saturation is not None and isinstance(frame, StepOutputs) and "saturation" in frame.stats:
            write_gauge(self._saturation, frame.stats["saturation"])

    def try_send(self, frame: Frame) -> None:
        """Like `send`, but does nothing if the parent has exited."""
        with contextlib.suppress(OSError):
            self.send(frame)

    def receive_into(self, inbox: Inbox) -> None:
        """Moves frames to the queue, with a BadFrame as the last. Ends the process at once, even during a step, when the parent exits."""
        with self._sock.makefile("rb") as file:
            try:
                while (received := receive(file, self._incoming)) is not None:
                    if (own := self._own(*received)) is not None:
                        inbox.put(own)
            except BadFrame as error:
                inbox.put(error)
                return
            except OSError:
                pass  # a connection reset
        os._exit(1)

    def _own(self, number: int, frame: Frame) -> tuple[int, Frame] | None:
        """A frame for this machine's engines, with its files; None for one that is answered here. Raises BadFrame."""
        if self._files is None:
            return number, frame
        if isinstance(frame, Pulse):
            return None
        try:
            return number, self._files.own(frame)
        except ChairliftError as error:
            log.error("%s", error)
            self.send(_refusal(frame, error), number)
            return None
        except (TypeError, AttributeError) as error:
            raise BadFrame(f"a frame of the kind {type(frame).__name__} is invalid: {error}") from None


def _refusal(frame: Frame, error: ChairliftError) -> Frame:
    """The reply to a frame that needs a file which this machine has not named."""
    if isinstance(frame, LoadAdapter):
        return AdapterChanged(frame.ask, type(error).__name__, str(error))
    assert isinstance(frame, Load)
    return Failed(type(error).__name__, str(error))
