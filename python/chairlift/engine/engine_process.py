"""The child process that runs engines, for one event loop: its start, its socket, its heartbeat and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from typing import ClassVar, Protocol, Self

from chairlift import errors
from chairlift.engine import frames
from chairlift.engine.exit_watch import ExitWatch
from chairlift.engine.frames import Alive, Failed, Fatal, Frame, Ready, ServiceShared, ShareService, Stop, Unload, Unloaded
from chairlift.engine.heartbeat import Heartbeat, is_stopped
from chairlift.errors import ChairliftError, EngineClosed, EngineDead
from chairlift.sampling import MAX_SEQUENCES

log = logging.getLogger("chairlift")

STOP_SECONDS = 5.0
"""Seconds that the process gets to exit before it is killed, and an engine to end before that is logged."""


class Client(Protocol):
    """The owner of an engine in the process."""

    def on_frame(self, frame: Frame) -> None:
        """Handles a frame of the engine."""

    def on_exit(self) -> None:
        """The process exits. `on_death` follows when the reason is known."""

    def on_death(self, error: ChairliftError) -> None:
        """The process has ended, and the engine with it."""


class EngineProcess:
    """A child process in which several `AsyncEngine` run, and take turns.

    Use it with `async with`, or call `close`. It starts with its first engine, and again with the next one after its end.
    """

    command: ClassVar[tuple[str, ...]] = ("-m", "chairlift.engine.process")
    """Arguments of Python that run the child process."""

    def __init__(self, load_format: str = "auto", *, exclusive: bool = False, environment: Mapping[str, str] | None = None) -> None:
        """`environment` has variables for the process, beside those of this one."""
        self.load_format = load_format
        """With "none" the process does not import what loads models beforehand."""
        self.exclusive = exclusive
        """Whether the process runs one engine and ends with it."""
        self._environment = environment or {}
        self.tags = itertools.count(1, MAX_SEQUENCES)  # a request's sequences have consecutive tags
        self._clients: dict[int, Client] = {}
        self._unloading: dict[int, asyncio.Future[None]] = {}
        self._sharing: deque[asyncio.Future[dict[str, int]]] = deque()  # waiting for `ServiceShared`
        self._process: subprocess.Popen[bytes] | None = None
        self._exiting = False
        self._running: set[int] = set()  # the engines that are ready; without one the process may load another and not read its socket
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None without a process."""
        return None if self._process is None else self._process.pid

    @property
    def stuck(self) -> tuple[str, float] | None:
        """See `Heartbeat.stuck`."""
        return self._heartbeat.stuck

    async def attach(self, client: Client) -> int:
        """Starts the process unless it runs. Returns the number of a new engine, for `write`."""
        async with self._starting:
            if self._process is not None and not self._exiting:
                return self._attach(client)
            if self._reading is not None:
                await asyncio.wait([self._reading])  # the engines before hear why the process has ended
            await self.close()
            sock = self._spawn()
            self._numbers = itertools.count()
            number = self._attach(client)
            try:
                self._reader, self._writer = await asyncio.open_connection(sock=sock)
            except BaseException:
                await self.close()
                raise
            self._reading = asyncio.create_task(self._read())
            return number

    def detach(self, number: int) -> None:
        """Lets the client of an engine hear no more of it."""
        self._clients.pop(number, None)

    async def unload(self, number: int) -> None:
        """Ends an engine and waits until its memory is free. One that still loads ends later."""
        if self._process is None or self._exiting:
            return
        self._unloading[number] = asyncio.get_running_loop().create_future()
        self.write(number, Unload())
        try:
            await asyncio.wait_for(self._unloading[number], STOP_SECONDS)
        except TimeoutError:
            log.warning("an engine did not end within %.0f s", STOP_SECONDS)
        finally:
            del self._unloading[number]

    async def share_service(self, elsewhere: Mapping[str, int]) -> dict[str, int]:
        """Charges tenants for their service in other processes. Returns their service in this one since the last call.

        Service is in microseconds of engine time divided by the tenant's weight. The first call returns nothing, and so does a process
        without engines. Raises what `Client.on_death` is told if the process ends.
        """
        if not self._running or self._exiting or self._process is None:
            return {}
        shared: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._sharing.append(shared)
        self.write(0, ShareService(dict(elsewhere)))
        return await shared

    def write(self, number: int, frame: Frame) -> None:
        """Sends a frame to an engine."""
        self._writer.write(frames.encode(frame, number))

    async def drain(self) -> None:
        """Waits until the process has read most of what was sent."""
        with contextlib.suppress(ConnectionError):  # the engines fail with a better message
            await self._writer.drain()

    def kill(self) -> None:
        """Kills the process."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Ends the process, at once if no engine is ready. Requests of its engines raise EngineClosed. May be called repeatedly."""
        process, self._process = self._process, None
        if process is None:
            return
        self._end(EngineClosed("the engine was closed"))
        reading, self._reading = self._reading, None
        try:
            if self._running:
                self.write(0, Stop())
            else:
                process.kill()
            await asyncio.to_thread(process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the engine did not stop within %.0f s: killing it", STOP_SECONDS)
        finally:
            process.kill()  # it ignores SIGTERM
            process.wait()
            if reading is not None:
                reading.cancel()
                self._writer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _attach(self, client: Client) -> int:
        number = next(self._numbers)
        self._clients[number] = client
        return number

    def _spawn(self) -> socket.socket:
        """Starts the child and returns the parent's end of their socket.

        Must be called in the event loop's thread: the child is killed when the thread that started it ends.
        """
        self._exiting = False
        self._running.clear()
        loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(self.kill, lambda: self.pid is not None and is_stopped(self.pid))
        self._exit_watch = ExitWatch(loop, self._process_exits)
        parent_end, child_end = socket.socketpair()
        # The child has this process's module path and does not import from its working directory.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        command = [sys.executable, "-P", *self.command, str(child_end.fileno()), self.load_format]
        # Ctrl-C in a terminal also reaches the child, which has no handler until it has imported: it inherits the blocked signal.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with child_end:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[child_end.fileno()],
                    env={**os.environ, "PYTHONPATH": path, **self._environment},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return parent_end

    async def _read(self) -> None:
        """Passes the process's frames to the engines' clients until it ends."""
        death: ChairliftError | None = None
        try:
            while (received := await frames.read(self._reader)) is not None:
                number, frame = received
                match frame:
                    case Alive():
                        self._heartbeat.on_message(frame)
                    case Fatal():
                        death = reported(frame)
                    case ServiceShared(service):
                        shared = self._sharing.popleft()
                        if not shared.done():
                            shared.set_result(service)
                    case Unloaded():
                        self._running.discard(number)
                        if (unloading := self._unloading.get(number)) is not None and not unloading.done():
                            unloading.set_result(None)
                    case _:
                        if isinstance(frame, Ready):
                            self._on_ready(number, frame)
                        elif isinstance(frame, Failed):
                            self._running.discard(number)
                        if (client := self._clients.get(number)) is not None:
                            client.on_frame(frame)
        except OSError:
            pass  # a connection reset
        except Exception as error:
            log.exception("reading from the engine failed")
            death = EngineDead(f"the connection to the engine's process broke: {type(error).__name__}: {error}")
        process = self._process
        if process is None:  # `close` was called
            return
        self._process_exits()
        if death is None:
            # The socket closes shortly before the process exits.
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 1.0)
            death = EngineDead(f"the engine's process ended unexpectedly ({_exit_words(process.returncode)})")
        process.kill()
        self._end(death)

    def _on_ready(self, number: int, frame: Ready) -> None:
        self._running.add(number)
        self._exit_watch.watch(frame.sentinels)
        if self._watching is None:
            self._watching = asyncio.create_task(self._heartbeat.watch())

    def _process_exits(self) -> None:
        """Lets engines reject new requests. Open requests fail when the socket closes and the exit status is known."""
        if self._process is not None and not self._exiting:
            self._exiting = True
            for client in list(self._clients.values()):
                client.on_exit()

    def _end(self, death: ChairliftError) -> None:
        """Ends all engines."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.on_death(death)
        for unloading in self._unloading.values():
            if not unloading.done():
                unloading.set_result(None)
        while self._sharing:
            if not (shared := self._sharing.popleft()).done():
                shared.set_exception(death)
        self._exit_watch.close()
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None


def reported(frame: Failed | Fatal) -> ChairliftError:
    """The exception that an engine's or the process's last message reports, if it is a chairlift exception; else EngineDead."""
    kind = getattr(errors, frame.error, None)
    if isinstance(kind, type) and issubclass(kind, ChairliftError):
        return kind(frame.message)
    return EngineDead(f"the engine ended: {frame.error}: {frame.message}")


def _exit_words(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
