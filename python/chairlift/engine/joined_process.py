"""A process of another machine that runs engines, and has joined this one by a connection that was checked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from chairlift.engine.frames import Add, Explained, Frame, StepOutputs
from chairlift.engine.machine_files import without_files
from chairlift.engine.seal import Seals
from chairlift.errors import EngineDead

_TIMES = ("arrived", "submitted", "started", "first_token", "ended")
SILENT_SECONDS = 20
"""Seconds after which a connection counts as broken if the other machine acknowledges nothing."""
_PROBES = 3


class JoinedProcess:
    """A process that this one neither starts nor restarts. It ends with its connection.

    `clock_ahead` is how far its monotonic clock is ahead of this machine's, in microseconds, as far as that is known.
    """

    pid = None

    def __init__(self, sock: socket.socket, name: str, clock_ahead: int, seals: Seals) -> None:
        self.name = name
        """The other machine's address, for the log."""
        self.seals = seals
        """Authenticate the frames to the process and from it."""
        self._sock: socket.socket | None = sock
        self._connection = sock
        self._clock_ahead = clock_ahead

    def connect(self) -> socket.socket:
        """The connection, once. Raises EngineDead later."""
        sock, self._sock = self._sock, None
        if sock is None:
            raise EngineDead(f"the connection to the engine of {self.name} has ended")
        return sock

    def kill(self) -> None:
        """Ends the connection, at which the process ends."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def why_hopeless(self) -> str | None:
        """Why the process cannot go on by itself although its connection is open."""
        return f"the engine of {self.name} does not answer"

    async def wait(self, reading: asyncio.Task[None] | None, seconds: float) -> bool:
        """Waits for the end of its connection, which `reading` reads. Returns whether that came in time."""
        return reading is None or bool((await asyncio.wait([reading], timeout=seconds))[0])

    def reap(self) -> None:
        """Does nothing: the other machine does it."""

    async def how_it_ended(self) -> str:
        """The reason for its end, after its connection has closed."""
        return f"the connection to the engine of {self.name} ended"

    def sent(self, frame: Frame) -> Frame:
        """A frame as the process understands it: without a time of this machine's clock, and without its files."""
        return Add(frame.tag, {**frame.request, "submitted": None}) if isinstance(frame, Add) else without_files(frame)

    def received(self, frame: Frame) -> Frame:
        """A frame of the process with times of this machine's clock."""
        match frame:
            case StepOutputs(ended=timelines) | Explained(timelines=timelines) if timelines:
                moved = self._moved(timelines)
                return replace(frame, ended=moved) if isinstance(frame, StepOutputs) else replace(frame, timelines=moved)
        return frame

    def _moved(self, timelines: Iterable[Mapping[str, Any]]) -> list[Any]:
        return [{**one, **{name: one[name] - self._clock_ahead for name in _TIMES if one.get(name) is not None}} for one in timelines]


def detect_silence(sock: socket.socket) -> None:
    """Lets the kernel end a TCP connection whose other machine is gone, and send frames without delay."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // (_PROBES + 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // (_PROBES + 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
