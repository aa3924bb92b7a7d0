"""Accepts the connections of engines on other machines, and hands over those that know the secret."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from chairlift.engine.background import in_background
from chairlift.engine.handshake import BadHandshake, JoinRefused, admit
from chairlift.engine.joined_process import JoinedProcess, detect_silence
from chairlift.engine.secret import Secret

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 32
"""Most connections that have not proved anything yet; more are closed at once."""
PAUSE_SECONDS = 1.0
"""Pause after an error of the system, which has no file descriptors left for example."""


class EngineListener:
    """The owner of the listening socket for engines. `on_join` gets each process that knows the secret."""

    def __init__(self, listener: socket.socket, secret: Secret, on_join: Callable[[JoinedProcess], None]) -> None:
        self._listener = listener
        self._secret = secret
        self._on_join = on_join
        self._handshakes: set[asyncio.Task[None]] = set()

    async def accept(self) -> None:
        """Accepts connections, forever."""
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError as error:
                logger.error("cannot accept an engine's connection: %s", error.strerror or error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if len(self._handshakes) >= MAX_HANDSHAKES:
                sock.close()
                continue
            task = asyncio.create_task(self._check(sock, f"{address[0]}:{address[1]}"))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def close(self) -> None:
        """Ends the handshakes that are going on."""
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _check(self, sock: socket.socket, name: str) -> None:
        try:
            sock.setblocking(False)
            detect_silence(sock)
            hello = await admit(sock, self._secret)
        except (BadHandshake, JoinRefused, OSError) as error:
            sock.close()
            logger.warning("the engine of %s is refused: %s", name, error)
        except BaseException:
            sock.close()
            raise
        else:
            logger.info("the engine of %s joins", name)
            self._on_join(JoinedProcess(sock, name, hello.clock - time.monotonic_ns() // 1000))


@asynccontextmanager
async def accepting(listener: socket.socket, secret: Secret, on_join: Callable[[JoinedProcess], None]) -> AsyncIterator[None]:
    """Lets engines join for the duration of the block."""
    engines = EngineListener(listener, secret, on_join)
    try:
        async with in_background(engines.accept()):
            yield
    finally:
        await engines.close()
