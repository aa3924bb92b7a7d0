"""Limits of connections and of bodies that arrive, before a request is admitted."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import ssl
from types import SimpleNamespace

import httpx
import pytest
from fake_server import own_process, status
from raw_connection import connected, rest
from scripted_engine import ScriptedEngine
from server_here import serving, wait_until

from chairlift.server import supervisor
from chairlift.server.errors import ApiError
from chairlift.server.http import connections, protocol
from chairlift.server.http.bodies import Bodies
from chairlift.server.http.connections import AcceptFailures, Connections, ConnectionState, connection_limit

GET = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n"


class Connection:
    def __init__(self, ended):
        self.end = lambda: ended.append(self)


def test_the_connection_that_was_idle_for_longest_ends_first():
    held, ended = Connections(4), []
    first, second, receiving, answering = made = [Connection(ended) for _ in range(4)]
    assert all(map(held.enter, made))
    held.set_state(receiving, ConnectionState.RECEIVING)
    held.set_state(answering, ConnectionState.ANSWERING)
    held.set_state(first, ConnectionState.ANSWERING)
    held.set_state(first, ConnectionState.IDLE)  # it has been idle for less than the second one
    for _ in range(3):
        busy = Connection(ended)
        assert held.enter(busy)
        held.set_state(busy, ConnectionState.ANSWERING)
    assert ended == [second, first, receiving]
    refused = Connection(ended)
    assert not held.enter(refused)
    assert (len(held), len(ended), answering in held, refused in held, first in held) == (4, 3, True, False, False)
    held.set_state(second, ConnectionState.ANSWERING)  # one that has ended may report once more
    held.leave(second)
    held.leave(answering)
    assert held.enter(refused)


def test_bodies_that_arrive_leave_room_for_others():
    held, ended = Connections(8), []
    made = [Connection(ended) for _ in range(6)]
    for one in made:
        assert held.enter(one)
        held.set_state(one, ConnectionState.RECEIVING)
    assert ended == made[:2]
    held.set_state(made[2], ConnectionState.ANSWERING)
    last = Connection(ended)
    held.enter(last)
    held.set_state(last, ConnectionState.RECEIVING)
    assert ended == made[:2]


def test_nothing_is_made_for_requests_of_a_connection_that_sends_none():
    async def work():
        held, calls = Connections(1), []
        one = protocol.HttpProtocol(config=None, server_state=SimpleNamespace(connections=held), app_state={}, _loop=None)
        one.connection_made(SimpleNamespace(close=lambda: calls.append("close"), abort=lambda: calls.append("abort")))
        assert one in held
        one.shutdown()
        one.end()
        one.connection_lost(None)
        assert (calls, len(held)) == (["close", "abort"], 0)

    asyncio.run(work())


def test_there_is_room_for_files_beside_the_connections(monkeypatch):
    resource = pytest.importorskip("resource")
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert connection_limit() == (4096 - connections.RESERVED_DESCRIPTORS) // 2
    assert limits[-1] == (4096, 4096)
    limits.append((1 << 20, 1 << 20))
    assert connection_limit() == connections.MAX_CONNECTIONS
    limits.append((256, 256))
    assert connection_limit() == 80


def test_idle_connections_outlive_those_of_clients():
    assert supervisor.KEEP_ALIVE_SECONDS > 90  # Go's clients keep them as long


@pytest.fixture
def eight(monkeypatch):
    """Servers have room for eight connections."""
    monkeypatch.setattr(protocol, "Connections", lambda _, tls: Connections(8, tls))


def test_idle_connections_make_room_for_others(eight):
    engine = ScriptedEngine()
    with serving(engine) as (base, service), contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=base, timeout=30))
        stream = stack.enter_context(client.stream("POST", "/v1/completions", json={"prompt": "paused", "max_tokens": 999, "stream": True}))
        opened = [stack.enter_context(connected(base)) for _ in range(4)]
        for number in range(40):
            opened.append(stack.enter_context(connected(base)))
            opened[-1].sendall((b"", GET, GET[:20], POST + b"{")[number % 4])
        assert httpx.get(f"{base}/live").status_code == 200
        for sock in opened[:30]:
            rest(sock)
        engine.released = True
        assert stream.read().endswith(b"data: [DONE]\n\n")
        wait_until(lambda: service.open <= 8)
    wait_until(lambda: service.open == 0)


def test_connections_whose_requests_are_answered_stay(eight):
    engine = ScriptedEngine()
    with serving(engine) as (base, _), contextlib.ExitStack() as stack:
        body = {"prompt": "paused", "max_tokens": 999, "stream": True}
        streams = [stack.enter_context(httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=30)) for _ in range(8)]
        with connected(base) as sock:
            got = rest(sock)
            assert got.startswith(b"HTTP/1.1 503 ")
            assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        engine.released = True
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in streams)
    with serving(engine) as (base, _):
        assert httpx.get(f"{base}/live").status_code == 200


def test_a_connection_that_is_refused_before_its_handshake_gets_no_plain_text(eight, certificate):
    cert, key = certificate
    engine = ScriptedEngine()
    trusted = ssl.create_default_context(cafile=cert)
    with serving(engine, ssl_certfile=cert, ssl_keyfile=key) as (base, _), contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=base, timeout=30, verify=trusted))
        body = {"prompt": "paused", "max_tokens": 999, "stream": True}
        for _ in range(8):
            stack.enter_context(client.stream("POST", "/v1/completions", json=body))
        with connected(base) as sock:
            assert rest(sock) == b""
        engine.released = True


def test_connections_without_a_handshake_are_idle(eight, certificate):
    cert, key = certificate
    trusted = ssl.create_default_context(cafile=cert)
    with serving(ScriptedEngine(), ssl_certfile=cert, ssl_keyfile=key) as (base, _), contextlib.ExitStack() as stack:
        for _ in range(30):
            silent = stack.enter_context(connected(base))
            assert httpx.get(f"{base}/live", verify=trusted).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(base.replace("https", "http"))
        silent.close()
        assert httpx.get(f"{base}/live", verify=trusted).status_code == 200


def test_a_handshake_that_never_ends_is_cut(monkeypatch, certificate):
    monkeypatch.setattr(protocol, "HANDSHAKE_SECONDS", 0.2)
    cert, key = certificate
    with serving(ScriptedEngine(), ssl_certfile=cert, ssl_keyfile=key) as (base, _), connected(base) as sock:
        assert rest(sock) == b""


@pytest.mark.slow
def test_idle_connections_under_a_low_limit_of_files_stop_nothing(tmp_path):
    with own_process(tmp_path, "process", max_files=160) as (process, client, engine), contextlib.ExitStack() as stack:
        base = str(client.base_url)
        process.send_signal(signal.SIGSTOP)  # so that it finds all of them at once
        for number in range(200):
            sock = stack.enter_context(connected(base))
            sock.sendall((GET, b"", POST, GET[:20])[number % 4])
        process.send_signal(signal.SIGCONT)
        for _ in range(3):
            assert httpx.get(f"{base}/live").status_code == httpx.get(f"{base}/v1/models").status_code == 200
        os.kill(engine(), signal.SIGKILL)
        wait_until(lambda: status(client, "/ready") == 503)
        wait_until(lambda: status(client, "/ready") == 200)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        stack.pop_all().close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        log = process.stderr.read()
        assert "out of system resource" not in log
        assert len(log) < 100_000


def test_failures_to_accept_are_logged_once_a_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    logged = AcceptFailures()

    cause = OSError(24, "Too many open files")

    def lines(message):
        records = [logging.LogRecord("asyncio", logging.ERROR, "", 0, message, (), (OSError, cause, None)) for _ in range(100)]
        return len(kept := [record for record in records if logged.filter(record)]), kept and logging.Formatter().format(kept[0])

    failure = "socket.accept() out of system resource\nsocket: <asyncio.TransportSocket fd=6>"
    line = "no connection can be accepted ([Errno 24] Too many open files): raise the limit of open files (ulimit -n)"
    assert lines(failure) == (1, line)
    assert lines("Task exception was never retrieved")[0] == 100
    now[0] = 59.0
    assert lines(failure) == (0, [])
    now[0] = 60.0
    assert lines(failure) == (1, line)


def test_of_too_many_bodies_the_oldest_of_the_largest_group_is_refused():
    async def work():
        bodies, refused, tasks, held = Bodies(100), [], [], {}

        async def arrive(name, group):
            try:
                async with bodies.arriving(group) as held[name]:
                    await asyncio.Event().wait()
            except ApiError as refusal:
                refused.append((name, refusal.status))

        async def resize(name, group, size):
            if name not in held:
                tasks.append(asyncio.create_task(arrive(name, group)))
                await asyncio.sleep(0)
            bodies.resize(held[name], size)
            for _ in range(5):
                await asyncio.sleep(0)

        await resize("honest", "alice", 30)
        await resize("first", "eve", 30)
        await resize("second", "eve", 40)
        assert refused == []
        await resize("third", "eve", 20)
        assert refused == [("first", 503)]
        await resize("first", "eve", 1000)  # what it receives before it notices
        await resize("honest", "alice", 40)
        assert len(refused) == 1
        await resize("honest", "alice", 70)
        assert refused[1:] == [("honest", 503)]
        await resize("second", "eve", 80)
        assert len(refused) == 2
        await resize("second", "eve", 10)
        await resize("fourth", "bob", 70)
        assert len(refused) == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with bodies.arriving("alice") as alone:
            bodies.resize(alone, 100)  # the others are forgotten
        assert len(refused) == 2

    asyncio.run(work())


def test_uploads_that_are_in_memory_make_room_for_others(monkeypatch, tmp_path):
    monkeypatch.setattr("chairlift.server.app.MAX_BODIES_BYTES", 400_000)
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=B\r\ncontent-length: 900000\r\n\r\n"
    part = b'--B\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * 60_000
    data = {"data_dir": str(tmp_path / "data"), "max_body_size": 100_000}
    with serving(ScriptedEngine(), **data) as (base, service), contextlib.ExitStack() as stack:
        opened = []
        for _ in range(12):
            opened.append(stack.enter_context(connected(base)))
            opened[-1].sendall(head + part)
        for sock in opened[:6]:
            assert rest(sock).startswith(b"HTTP/1.1 503 ")
        reply = httpx.post(f"{base}/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"y" * 300_000)})
        assert (reply.status_code, reply.json()["bytes"]) == (200, 300_000)
        stack.pop_all().close()
        wait_until(lambda: service.open == 0)
        assert len(list((tmp_path / "data" / "files").iterdir())) == 1


def test_half_bodies_make_room_for_others(monkeypatch):
    monkeypatch.setattr("chairlift.server.app.MAX_BODIES_BYTES", 400_000)
    monkeypatch.setattr("chairlift.server.http.body.BODY_TIMEOUT", 1000)
    with serving(ScriptedEngine(), max_body_size=100_000) as (base, service), contextlib.ExitStack() as stack:
        opened = []
        for _ in range(12):
            opened.append(stack.enter_context(connected(base)))
            opened[-1].sendall(POST + b" " * 60_000)
        for sock in opened[:6]:
            got = rest(sock)
            assert got.startswith(b"HTTP/1.1 503 ")
            assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
        body = {"prompt": "a", "max_tokens": 1, "user": "x" * 90_000}
        assert httpx.post(f"{base}/v1/completions", json=body).status_code == 200
    wait_until(lambda: service.open == 0)
