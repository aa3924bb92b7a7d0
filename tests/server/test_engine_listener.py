"""The port for engines of other machines: whoever does not know the secret costs nothing and gets nothing."""

import asyncio
import logging
import socket
from contextlib import asynccontextmanager

import pytest

from chairlift.engine import handshake
from chairlift.engine.handshake import BadHandshake, introduce
from chairlift.engine.secret import Secret
from chairlift.server import engine_listener
from chairlift.server.engine_listener import Refusals, accepting

SECRET = Secret(b"s" * 32)


@asynccontextmanager
async def listening(joined):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.timeout(60), accepting(listener, SECRET, joined.append):
            yield listener.getsockname()


async def connection(address, source="127.0.0.1"):
    sock = socket.socket()
    sock.bind((source, 0))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address)
    return sock


async def closed(sock):
    return await asyncio.get_running_loop().sock_recv(sock, 1) == b""


def test_engines_that_know_the_secret_join_and_others_do_not(caplog):
    async def main():
        joined = []
        async with listening(joined) as address:
            with await connection(address) as stranger, pytest.raises(BadHandshake):
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


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(engine_listener, "MAX_HANDSHAKES", 3)
    monkeypatch.setattr(handshake, "PROOF_SECONDS", 1e6)  # only the bound closes a silent connection


def test_silent_connections_keep_no_engine_out(few):
    async def main():
        joined = []
        async with listening(joined) as address:
            silent = [await connection(address) for _ in range(3)]
            with await connection(address) as engine:
                await introduce(engine, SECRET)
                while not joined:
                    await asyncio.sleep(0)
                assert await closed(silent[0])
                for one in silent[1:]:
                    with pytest.raises(BlockingIOError):
                        one.recv(1)
            for one in silent:
                one.close()

    asyncio.run(main())


def test_the_connection_that_ends_is_of_the_address_that_has_most(few):
    async def main():
        async with listening([]) as address:
            with await connection(address, "127.0.0.2") as slow:
                silent = [await connection(address) for _ in range(20)]
                for one in silent[:-2]:
                    assert await closed(one)
                await introduce(slow, SECRET)
            for one in silent:
                one.close()

    asyncio.run(main())


def test_an_engine_joins_while_others_connect_without_end(few):
    async def main():
        joined, open_ones = [], []

        async def flood(address):
            while True:
                open_ones.append(await connection(address, "127.0.0.2"))
                await asyncio.sleep(0)

        async with listening(joined) as address:
            flooding = asyncio.create_task(flood(address))
            while len(open_ones) < 10:
                await asyncio.sleep(0)
            with await connection(address) as engine:
                await introduce(engine, SECRET)
            flooding.cancel()
            for one in open_ones:
                one.close()

    asyncio.run(main())


def test_a_flood_of_refusals_is_a_line_for_each_kind(caplog):
    async def main():
        async with listening([]) as address:
            for _ in range(20):
                with await connection(address) as garbage:
                    garbage.send(b"\xff\xff")
                    assert await closed(garbage)

    asyncio.run(main())
    [line] = [record.message for record in caplog.records]
    assert "a message of 65535 bytes in the handshake" in line


def test_what_is_not_logged_is_counted(caplog):
    times = iter([0.0, 1.0, 2.0, 9.0, 9.0, 10.0, 10.5, 30.0])
    refusals = Refusals(lambda: next(times))
    for error in [OSError("a"), OSError("b"), OSError("c"), BadHandshake("d"), *map(OSError, "efgh")]:
        refusals.log("refused", error)
    assert [record.message for record in caplog.records] == [
        "refused: a",
        "refused: d",
        "refused: f (and 3 more before, not logged)",
        "refused: h (and 1 more before, not logged)",
    ]
