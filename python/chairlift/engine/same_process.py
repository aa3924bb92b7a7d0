"""An engine in the process of its client: for one that only estimates, so that no call of it takes long."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping

from chairlift.config import EngineConfig
from chairlift.engine.engine_process import Client, EngineProcess
from chairlift.engine.frames import Frame, Load, Ready
from chairlift.engine.hosted_engine import HostedEngine, Task
from chairlift.engine.step_loop import EngineMaker, failed
from chairlift.engine.tenant_service import TenantService
from chairlift.errors import EngineClosed

log = logging.getLogger("chairlift")


class SameProcess(EngineProcess):
    """What `EngineProcess` is for one engine, without a process: its steps run in the event loop.

    So a request waits for no other process and no other thread until it is its turn.
    """

    def __init__(self, make: EngineMaker) -> None:
        """`make` makes the engine, on another thread."""
        super().__init__("none", exclusive=True)
        self._make = make
        self._hosted: HostedEngine | None = None
        self._inbox: deque[Frame | Task] = deque()
        self._next: asyncio.Handle | None = None  # of `_work`
        self._next_is_due = False
        self._loading: asyncio.Task[None] | None = None
        self._tenants = TenantService()

    @property
    def pid(self) -> None:
        """None: the engine runs in the client's process."""

    @property
    def stuck(self) -> None:
        """None: an engine that is stuck blocks whoever would ask."""

    async def attach(self, client: Client) -> int:
        """Returns the number of a new engine, for `write`."""
        self._loop, self._clients = asyncio.get_running_loop(), {0: client}
        return 0

    async def share_service(self, external: Mapping[str, int]) -> dict[str, int]:
        """See `EngineProcess.share_service`."""
        return {} if self._hosted is None else self._tenants.exchange([self._hosted.engine], external)

    def write(self, number: int, frame: Frame) -> None:
        """Gives a frame to the engine, which handles it in the event loop's next round."""
        if isinstance(frame, Load):
            self._loading = asyncio.create_task(self._load(frame))
        else:
            self._receive(frame)

    async def drain(self) -> None:
        """There is no socket."""

    def kill(self) -> None:
        """Ends the engine at once."""
        hosted, self._hosted = self._hosted, None
        if self._next is not None:
            self._next.cancel()
        self._next, self._next_is_due = None, False
        self._inbox.clear()
        try:
            if hosted is not None:
                hosted.close()
        except Exception:  # after an error of the core
            log.exception("the engine could not be closed")

    async def close(self) -> None:
        """Ends the engine. Its requests raise EngineClosed. May be called repeatedly."""
        if self._loading is not None:
            await asyncio.wait([self._loading])  # a thread cannot be cancelled
        self.kill()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.on_death(EngineClosed("the engine was closed"))

    async def _load(self, load: Load) -> None:
        try:
            engine = await asyncio.to_thread(self._make, EngineConfig(**load.settings), lambda name, seconds: None, load.hash_key)
        except Exception as error:
            self._fail(error)
            return
        self._hosted = HostedEngine(engine, self._send, self._put)
        self._send(Ready(engine.info.pack()))
        self._wake()

    def _put(self, task: Task) -> None:
        """Takes a task of another thread."""
        self._loop.call_soon_threadsafe(self._receive, task)

    def _receive(self, frame: Frame | Task) -> None:
        if self._hosted is not None:
            self._inbox.append(frame)
            self._wake()

    def _wake(self) -> None:
        """Has `_work` called in the event loop's next round."""
        if not self._next_is_due:
            if self._next is not None:
                self._next.cancel()
            self._next, self._next_is_due = self._loop.call_soon(self._work), True

    def _work(self) -> None:
        """Handles what was sent, and runs the step that is due."""
        self._next, self._next_is_due = None, False
        if (hosted := self._hosted) is None:
            return
        try:
            while self._inbox:
                hosted.handle(self._inbox.popleft())
            hosted.step()
        except BaseException as error:  # a panic of the core is not an Exception
            self._fail(error)
            return
        if hosted.busy:
            self._wake()
        elif hosted.wakes_at is not None and self._next is None:
            self._next = self._loop.call_at(hosted.wakes_at, self._work)

    def _send(self, frame: Frame) -> None:
        if (client := self._clients.get(0)) is not None:
            client.on_frame(frame)

    def _fail(self, error: BaseException) -> None:
        """Ends the engine because of an error, which its client hears of."""
        self._send(failed(error))
        self.kill()
