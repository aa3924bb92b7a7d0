"""The port for engines of other machines: whoever does not know the secret costs nothing and gets nothing."""

import asyncio
import logging
import socket
from contextlib import asynccontextmanager

import pytest

from chairlift.engine import handshake
from chairlift.engine.handshake import JoinRefused, introduce
from chairlift.engine.secret import Secret
from chairlift.server import engine_listener
from chairlift.server.engine_listener import accepting

SECRET = Secret(b"s" * 32)


@asynccontextmanager
async def listening(joined):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.timeout(60), accepting(listener, SECRET, joined.append):
            yield listener.getsockname()


async def connection(address):
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address)
    return sock


def test_engines_that_know_the_secret_join_and_others_do_not(caplog):
    async def main():
        joined = []
        async with listening(joined) as address:
            with await connection(address) as stranger, pytest.raises(JoinRefused):
                await introduce(stranger, Secret(b"t" * 32))
            with await connection(address) as engine:
                await introduce(engine, SECRET)
                while not joined:
                    await asyncio.sleep(0)
        assert len(joined) == 1

    caplog.set_level(logging.INFO)
    asyncio.run(main())
    [refusal] = [record.message for record in caplog.records if "is refused" in record.message]
    assert "it has another secret" in refusal
    assert "s" * 32 not in caplog.text


def test_many_silent_connections_are_bounded_and_keep_no_engine_out_for_ever(monkeypatch):
    monkeypatch.setattr(engine_listener, "MAX_HANDSHAKES", 3)
    monkeypatch.setattr(handshake, "SECONDS", 1e6)  # only the bound closes a silent connection

    async def main():
        joined = []
        async with listening(joined) as address:
            silent = [await connection(address) for _ in range(3)]
            with await connection(address) as another:
                assert await asyncio.get_running_loop().sock_recv(another, 1) == b""
            for one in silent:
                one.close()
            while not joined:
                with await connection(address) as engine:
                    try:
                        await introduce(engine, SECRET)
                    except Exception:
                        continue  # the server has not seen the others' end yet
                    while not joined:
                        await asyncio.sleep(0)

    asyncio.run(main())
