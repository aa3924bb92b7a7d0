"""A process that runs engines, for one event loop: its frames, its heartbeat and its end. It is a child, or joins from elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from chairlift import errors
from chairlift.engine import frames
from chairlift.engine.exit_watch import ExitWatch
from chairlift.engine.frames import (
    Alive,
    BadFrame,
    Failed,
    Fatal,
    Frame,
    Leaving,
    Pulse,
    Ready,
    ServiceShared,
    ShareService,
    Stop,
    Unload,
    Unloaded,
)
from chairlift.engine.heartbeat import Heartbeat
from chairlift.engine.spawned_process import COMMAND, Spawned, SpawnedProcess
from chairlift.errors import ChairliftError, EngineClosed, EngineDead
from chairlift.sampling import MAX_SEQUENCES

if TYPE_CHECKING:
    from chairlift.engine.joined_process import JoinedProcess

log = logging.getLogger("chairlift")

PULSE_SECONDS = 1.0
"""Interval of `Pulse`."""
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
    """A process in which several `AsyncEngine` run, and take turns.

    Use it with `async with`, or call `close`. A child starts with its first engine, and again with the next one after its end. One that
    has joined from another machine does not start again. One that awaits such processes takes the next one each time.
    """

    command: ClassVar[tuple[str, ...]] = COMMAND
    """Arguments of Python that run the child process."""

    def __init__(
        self,
        load_format: str = "auto",
        *,
        exclusive: bool = False,
        environment: Mapping[str, str] | None = None,
        joined: JoinedProcess | None = None,
        awaits_join: bool = False,
    ) -> None:
        """`environment` has variables for a child, beside those of this process.

        With `joined` there is no child, and with `awaits_join` there is none either: each start waits for a process that joins.
        """
        self.load_format = load_format
        """With "none" the process does not import what loads models beforehand."""
        self.exclusive = exclusive
        """Whether the process runs one engine and ends with it."""
        self.joined = joined
        """The process on another machine; None for a child, and until one has joined that is awaited."""
        self._awaited: asyncio.Queue[JoinedProcess] | None = asyncio.Queue(1) if awaits_join else None
        self._environment = environment or {}
        self.tags = itertools.count(1, MAX_SEQUENCES)  # a request's sequences have consecutive tags
        self.leaving = asyncio.Event()
        """Set when the process's machine wants to end it."""
        self._clients: dict[int, Client] = {}
        self._unloading: dict[int, asyncio.Future[None]] = {}
        self._sharing: deque[asyncio.Future[dict[str, int]]] = deque()  # waiting for `ServiceShared`
        self._process: SpawnedProcess | JoinedProcess | None = None
        self._socket: socket.socket | None = None  # of a child that was started before its first engine
        self._exiting = False
        self._running: set[int] = set()  # the engines that are ready; without one the process may load another and not read its socket
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._pulsing: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None without a process."""
        return None if self._process is None else self._process.pid

    @property
    def stuck(self) -> tuple[str, float] | None:
        """See `Heartbeat.stuck`."""
        return self._heartbeat.stuck

    def start_early(self, spawned: Spawned | None = None) -> None:
        """Starts the child in the event loop's thread, before there is an engine for it, so that it imports meanwhile.

        `spawned` is one that this thread has started already.
        """
        self._socket = self._start(spawned)

    async def attach(self, client: Client) -> int:
        """Starts the process unless it runs. Returns the number of a new engine, for `write`."""
        async with self._starting:
            sock, self._socket = self._socket, None
            if sock is None and self._process is not None and not self._exiting:
                return self._attach(client)
            if self._reading is not None:
                await asyncio.wait([self._reading])  # the engines before hear why the process has ended
            if sock is None:
                if self._process is not None:
                    await self.close()
                if self._awaited is not None:
                    self.joined = await self._awaited.get()
                sock = self._start()
            self._numbers = itertools.count()
            number = self._attach(client)
            try:
                self._reader, self._writer = await asyncio.open_connection(sock=sock)
            except BaseException:
                await self.close()
                raise
            self._reading = asyncio.create_task(self._read())
            if self.joined is not None:
                self._pulsing = asyncio.create_task(self._pulse())
            return number

    def offer(self, joined: JoinedProcess) -> bool:
        """Gives a process that has joined to the engine that awaits one. Returns whether it takes it."""
        if self._awaited is None or self._awaited.full() or (self._process is not None and not self._exiting):
            return False
        self._awaited.put_nowait(joined)
        return True

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

    async def share_service(self, external: Mapping[str, int]) -> dict[str, int]:
        """Charges tenants for their service in other processes. Returns their service in this one since the last call.

        Service is in microseconds of engine time divided by the tenant's weight. The first call returns nothing, and so does a process
        without engines. Raises what `Client.on_death` is told if the process ends.
        """
        if not self._running or self._exiting or self._process is None:
            return {}
        shared: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._sharing.append(shared)
        self.write(0, ShareService(dict(external)))
        return await shared

    def write(self, number: int, frame: Frame) -> None:
        """Sends a frame to an engine."""
        seal = None
        if self.joined is not None:
            frame, seal = self.joined.sent(frame), self.joined.seals.outgoing
        self._writer.write(frames.encode(frame, number, seal))

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
            if self.joined is not None:
                self.joined.kill()
            return
        self._end(EngineClosed("the engine was closed"))
        reading, self._reading = self._reading, None
        try:
            if self._running:
                self.write(0, Stop())
            else:
                process.kill()
            if not await process.wait(reading, STOP_SECONDS):
                log.warning("the engine did not stop within %.0f s: killing it", STOP_SECONDS)
        finally:
            process.kill()  # it ignores SIGTERM
            process.reap()
            if reading is not None:
                reading.cancel()
                self._writer.close()
            elif self._socket is not None:
                self._socket.close()
                self._socket = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _attach(self, client: Client) -> int:
        number = next(self._numbers)
        self._clients[number] = client
        return number

    def _start(self, spawned: Spawned | None = None) -> socket.socket:
        """Starts the child unless it is `spawned`, or takes the process that has joined. Returns this end of the socket.

        Must be called in the event loop's thread: the child is killed when the thread that started it ends.
        """
        self._exiting = False
        self.leaving.clear()
        self._running.clear()
        if self.joined is not None:
            parent_end = self.joined.connect()
            process: SpawnedProcess | JoinedProcess = self.joined
        else:
            process, parent_end = spawned or SpawnedProcess.start(self.command, self.load_format, self._environment)
        self._process = process
        self._heartbeat = Heartbeat(self.kill, process.why_hopeless)
        self._exit_watch = ExitWatch(asyncio.get_running_loop(), self._process_exits)
        return parent_end

    async def _read(self) -> None:
        """Passes the process's frames to the engines' clients until it ends."""
        death: ChairliftError | None = None
        try:
            seal = None if self.joined is None else self.joined.seals.incoming
            while (received := await frames.read(self._reader, seal)) is not None:
                number, frame = received
                if self.joined is not None:
                    frame = self.joined.received(frame)
                match frame:
                    case Alive():
                        self._heartbeat.on_message(frame)
                    case Fatal():
                        death = reported(frame)
                    case ServiceShared(service):
                        shared = self._sharing.popleft()
                        if not shared.done():
                            shared.set_result(service)
                    case Leaving():
                        self.leaving.set()
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
        except BadFrame as error:
            death = EngineDead(f"the connection to the engine's process broke: {error}")
        except Exception as error:
            log.exception("reading from the engine failed")
            death = EngineDead(f"the connection to the engine's process broke: {type(error).__name__}: {error}")
        process = self._process
        if process is None:  # `close` was called
            return
        self._process_exits()
        if death is None:
            death = EngineDead(await process.how_it_ended())
        process.kill()
        self._end(death)

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            self.write(0, Pulse())

    def _on_ready(self, number: int, frame: Ready) -> None:
        self._running.add(number)
        if self.joined is None:
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
        for task in (self._watching, self._pulsing):
            if task is not None:
                task.cancel()
        self._watching = self._pulsing = None


def reported(frame: Failed | Fatal) -> ChairliftError:
    """The exception that an engine's or the process's last message reports, if it is a chairlift exception; else EngineDead."""
    kind = getattr(errors, frame.error, None)
    if isinstance(kind, type) and issubclass(kind, ChairliftError):
        return kind(frame.message)
    return EngineDead(f"the engine ended: {frame.error}: {frame.message}")
