"""`chairlift join` goes on asking whoever is at the server's address, unless the server itself refuses it."""

import asyncio
import logging
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from chairlift.engine import handshake, joining
from chairlift.engine.handshake import JoinRefused, admit, own_hello
from chairlift.engine.joining import join
from chairlift.engine.machine_files import MachineFiles
from chairlift.engine.secret import Secret

SECRET = Secret(b"s" * 32)
GUARD = 60


@asynccontextmanager
async def server(answer):
    """Answers each connection so; yields its address and the number of connections so far."""
    connections = []

    async def accept(listener):
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            connections.append(sock)
            with sock:
                sock.setblocking(False)
                await answer(sock)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.create_task(accept(listener))
        yield listener.getsockname(), connections
        accepting.cancel()


async def refuses(sock):
    """A stranger's refusal, as the server of another secret sends it."""
    loop = asyncio.get_running_loop()
    await loop.sock_recv(sock, 1000)
    await loop.sock_sendall(sock, own_hello("server").encode() + b"\0\x10\x81\xa7refused\xa6secret")
    await loop.sock_recv(sock, 1000)


async def has_another_protocol(sock):
    await asyncio.get_running_loop().sock_sendall(sock, replace(own_hello("server"), protocol="0").encode())


async def closes(sock):
    pass


@pytest.mark.parametrize("answer", [refuses, has_another_protocol, closes])
def test_a_refusal_of_a_stranger_is_logged_once_and_asked_again(answer, monkeypatch, caplog):
    monkeypatch.setattr(joining, "MAX_DELAY", 0)

    async def main():
        leaving = asyncio.Event()
        async with asyncio.timeout(GUARD), server(answer) as (address, connections):
            task = asyncio.create_task(join(*address, SECRET, MachineFiles({}), leaving))
            while len(connections) < 5:
                await asyncio.sleep(0.001)
            assert not task.done()
            leaving.set()
            await task

    asyncio.run(main())
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == len({line.partition(": joining")[0] for line in lines})  # the connection may break at several places


def test_a_refusal_of_the_server_itself_ends_join(monkeypatch):
    hello = own_hello
    monkeypatch.setattr(handshake, "own_hello", lambda role: replace(hello(role), protocol="0") if role == "server" else hello(role))

    async def admits(sock):
        await admit(sock, SECRET)

    async def main():
        async with asyncio.timeout(GUARD), server(admits) as (address, _):
            with pytest.raises(JoinRefused, match="install the same version"):
                await join(*address, SECRET, MachineFiles({}), asyncio.Event())

    asyncio.run(main())
