"""Runs an engine of this machine for a server on another one: connects, checks the server, and starts the engine's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

from chairlift.engine.background import in_background
from chairlift.engine.engine_process import EngineProcess
from chairlift.engine.handshake import SECONDS, BadHandshake, Peer, introduce
from chairlift.engine.join_settings import JoinSettings
from chairlift.engine.joined_process import detect_silence
from chairlift.engine.machine_files import MachineFiles
from chairlift.engine.secret import Secret
from chairlift.engine.spawned_process import SpawnedProcess

log = logging.getLogger("chairlift")

MAX_DELAY = 30
"""Maximum seconds between two attempts to join; the first pause is a second."""
CHECK_SECONDS = 5.0
"""Interval at which a running engine is looked at."""
STABLE_SECONDS = 60
"""After an engine that ran this long, the pauses begin at a second again."""


async def join(host: str, port: int, secret: Secret, files: MachineFiles, leaving: asyncio.Event) -> None:
    """Runs an engine for the server at this address, and another one after its end.

    When `leaving` is set, the server lets the engine's requests end or go on in another engine, and this returns. Cancelling this ends the
    engine at once. Raises JoinRefused if the server proves that it knows the secret and has another version. Whatever else is at the
    address is asked again, as it may not be the server; the same reason is logged once.
    """
    failures = 0
    logged: set[str] = set()
    while True:
        began = time.monotonic()
        try:
            reason = await run_engine(host, port, secret, files, leaving)
            level = logging.WARNING
            logged.clear()
        except BadHandshake as error:
            reason = str(error)
            level = logging.DEBUG if reason in logged else logging.WARNING
            logged.add(reason)
        if leaving.is_set():
            return
        failures = 0 if time.monotonic() - began > STABLE_SECONDS else failures
        delay = min(1 << failures, MAX_DELAY)
        failures += 1
        log.log(level, "%s: joining %s:%d again in %d s, and then with pauses of up to %d s", reason, host, port, delay, MAX_DELAY)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(leaving.wait(), delay)


async def run_engine(
    host: str, port: int, secret: Secret, files: MachineFiles, leaving: asyncio.Event, saturation: int | None = None
) -> str:
    """Runs one engine for the server at this address until its end, for which `leaving` asks the server.

    The engine keeps its saturation in the open file `saturation` (`engine.gauge`) from its first step on. Returns the reason for the end.
    Raises BadHandshake and JoinRefused.
    """
    sock, peer = await _connect(host, port, secret)
    log.info("joined the server at %s:%d", host, port)
    return await _run_engine(sock, JoinSettings(peer.keys, files), leaving, saturation)


async def _connect(host: str, port: int, secret: Secret) -> tuple[socket.socket, Peer]:
    """A connection whose other end knows the secret. Raises BadHandshake and JoinRefused."""
    try:
        sock = await asyncio.to_thread(socket.create_connection, (host, port), SECONDS)
    except OSError as error:
        raise BadHandshake(f"cannot connect: {error.strerror or error}") from None
    try:
        sock.setblocking(False)
        detect_silence(sock)
        peer = await introduce(sock, secret)
        sock.setblocking(True)
    except BaseException:
        sock.close()
        raise
    return sock, peer


async def _run_engine(sock: socket.socket, joined: JoinSettings, leaving: asyncio.Event, saturation: int | None) -> str:
    """Runs an engine that speaks on `sock` until its end. Returns the reason for that."""
    process = SpawnedProcess(EngineProcess.command, "auto", sock, {}, saturation, joined)

    async def leave() -> None:
        await leaving.wait()
        process.leave()

    try:
        async with in_background(leave()):
            while not await process.wait(None, CHECK_SECONDS):
                if process.why_hopeless():  # the server has given it up, and it does not see that
                    process.kill()
        return await process.how_it_ended()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.reap()
