"""A child process of this one that runs engines: its start, its socket and its end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

from chairlift.child_process import start_python
from chairlift.engine.process_signals import LEAVE
from chairlift.machine import file_text

if TYPE_CHECKING:
    import asyncio

    from chairlift.engine.join_settings import JoinSettings

COMMAND = ("-m", "chairlift.engine.process")
"""Arguments of Python that run the child process."""

EXIT_SECONDS = 1.0
"""Most seconds between the end of a process's socket and its exit."""


class SpawnedProcess:
    """A child process with one end of a socket.

    Must be made in a thread that does not end before the process: Linux kills the child when the thread that started it ends.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        load_format: str,
        child_end: socket.socket,
        environment: Mapping[str, str],
        saturation: int | None = None,
        joined: JoinSettings | None = None,
    ) -> None:
        """Starts Python with the arguments `command`, the number of the socket, which is closed here, and `load_format`.

        `saturation` is an open file for the engine's saturation (`engine.gauge`). An engine for the server of another machine gets
        `joined`, through its standard input, because other users see arguments and the environment.
        """
        gauge = [] if saturation is None else [saturation]
        argument = [] if joined is None else [joined.argument]
        with child_end:
            self._process = start_python(
                *(*command, str(child_end.fileno()), load_format, *argument, *map(str, gauge)),
                environment=environment,
                stdin=subprocess.DEVNULL if joined is None else subprocess.PIPE,
                pass_fds=[child_end.fileno(), *gauge],
            )
        if joined is not None and (stdin := self._process.stdin) is not None:
            with contextlib.suppress(BrokenPipeError), stdin:  # it has ended, as `wait` will say
                stdin.write(joined.encode())

    @classmethod
    def start(cls, command: tuple[str, ...], load_format: str, environment: Mapping[str, str]) -> Spawned:
        """Starts Python. Returns the process with this end of its socket."""
        parent_end, child_end = socket.socketpair()
        return cls(command, load_format, child_end, environment), parent_end

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """Kills the process, if it runs."""
        self._process.kill()

    def leave(self) -> None:
        """Lets the process tell the server that it leaves. One that has not begun to load an engine ends at once."""
        self._process.send_signal(LEAVE)

    def why_hopeless(self) -> str | None:
        """Why the process cannot go on by itself although it exists; None if it may, or where there is no /proc."""
        state = file_text(f"/proc/{self.pid}/stat").rpartition(")")[2].split()[:1]
        return "the engine's process was stopped by a signal" if state == ["T"] else None

    async def wait(self, reading: asyncio.Task[None] | None, seconds: float) -> bool:
        """Waits for its exit. Returns whether that came in time."""
        import asyncio  # the server starts its first child without it

        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def reap(self) -> None:
        """Waits until a killed process has ended."""
        self._process.wait()

    async def how_it_ended(self) -> str:
        """The reason for its end, after its socket has closed."""
        await self.wait(None, EXIT_SECONDS)
        return f"the engine's process ended unexpectedly ({exit_words(self._process.returncode)})"


Spawned = tuple[SpawnedProcess, socket.socket]
"""A child process with this end of its socket."""


def exit_words(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "it does not answer"
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
