"""Accepts the connections of engines on other machines, and hands over those that know the secret."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from chairlift.engine import clock
from chairlift.engine.background import cancel, in_background
from chairlift.engine.handshake import BadHandshake, JoinRefused, admit
from chairlift.engine.joined_process import JoinedProcess, detect_silence
from chairlift.engine.secret import Secret

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 32
"""Most connections that have not proved anything yet. For one more the oldest ends, of the address that has most of them."""
PAUSE_SECONDS = 1.0
"""Pause after an error of the system, which has no file descriptors left for example."""
LOG_SECONDS = 10.0
"""Seconds in which one line is logged for each kind of refusal: whoever reaches the port can cause as many as they like."""


class Refusals:
    """Logs refusals, and counts those that are not logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[type[Exception], float] = {}
        self._unlogged: Counter[type[Exception]] = Counter()

    def log(self, words: str, error: Exception) -> None:
        """Logs `words` and the error, unless one of its kind was logged just before."""
        kind, now = type(error), self._clock()
        if now < self._next.get(kind, 0.0):
            self._unlogged[kind] += 1
            return
        self._next[kind] = now + LOG_SECONDS
        more = self._unlogged.pop(kind, 0)
        logger.warning("%s: %s%s", words, error, f" (and {more} more before, not logged)" if more else "")


class EngineListener:
    """The owner of the listening socket for engines. `on_join` gets each process that knows the secret."""

    def __init__(self, listener: socket.socket, secret: Secret, on_join: Callable[[JoinedProcess], None]) -> None:
        self._listener = listener
        self._secret = secret
        self._on_join = on_join
        self._handshakes: dict[asyncio.Task[None], str] = {}  # the oldest first, with their addresses
        self._refusals = Refusals()

    async def accept(self) -> None:
        """Accepts connections, forever."""
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError as error:
                self._refusals.log("cannot accept an engine's connection", error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if len(self._handshakes) >= MAX_HANDSHAKES:
                self._drop_oldest()
            task = asyncio.create_task(self._check(sock, f"{address[0]}:{address[1]}"))
            self._handshakes[task] = address[0]
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))
            await asyncio.sleep(0)  # accepting does not wait while connections do: the others' turn

    async def close(self) -> None:
        """Ends the handshakes that are going on."""
        await cancel(self._handshakes)

    def _drop_oldest(self) -> None:
        """Ends the oldest handshake of the address that has most of them."""
        address = Counter(self._handshakes.values()).most_common(1)[0][0]
        oldest = next(task for task, one in self._handshakes.items() if one == address)
        del self._handshakes[oldest]
        oldest.cancel()
        self._refusals.log(f"an engine of {address} is refused", BadHandshake(f"{MAX_HANDSHAKES} others have proved nothing yet"))

    async def _check(self, sock: socket.socket, name: str) -> None:
        try:
            sock.setblocking(False)
            detect_silence(sock)
            peer = await admit(sock, self._secret)
        except (BadHandshake, JoinRefused, OSError) as error:
            sock.close()
            self._refusals.log(f"the engine of {name} is refused", error)
        except BaseException:
            sock.close()
            raise
        else:
            logger.info("the engine of %s joins", name)
            self._on_join(JoinedProcess(sock, name, peer.hello.clock - clock.now(), peer.seals()))


@asynccontextmanager
async def accepting(listener: socket.socket, secret: Secret, on_join: Callable[[JoinedProcess], None]) -> AsyncIterator[None]:
    """Lets engines join for the duration of the block."""
    engines = EngineListener(listener, secret, on_join)
    try:
        async with in_background(engines.accept()):
            yield
    finally:
        await engines.close()
