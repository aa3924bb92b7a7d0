import asyncio
import json
import socket
import threading

import pytest
from raw_connection import connected, rest
from server_here import wait_until

from chairlift.server.middleware.disconnect import run_until_disconnect

HEADERS = "host: localhost\r\ncontent-type: application/json\r\n"


UPGRADE = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n"
"""What Java's client adds to each request until a server has answered it."""


def leave(base, path, body, headers=""):
    """Sends a request, waits for nothing, and goes away."""
    raw = json.dumps(body).encode()
    with connected(base) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\n{HEADERS}{headers}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        yield sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "paused"}),
        ("/v1/completions", {"prompt": ["paused", "paused too"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "paused"}]}),
    ],
)
def test_the_engine_stops_when_the_client_goes(base, server, engine, http, path, prompt, stream):
    requests = len(prompt["prompt"]) if isinstance(prompt.get("prompt"), list) else 1
    for _ in leave(base, path, {**prompt, "max_tokens": 9, "stream": stream}):
        wait_until(lambda: engine.started == requests)
    wait_until(lambda: engine.left_early == requests)
    assert engine.finished == 0
    wait_until(lambda: server[1].open == 0)
    assert f'finished_reason="abort",model_name="org/fake-model"}} {requests}.0' in http.get("/metrics").text


def test_a_client_that_ends_its_sending_has_gone(base, server, engine):
    for sock in leave(base, "/v1/completions", {"prompt": "paused", "max_tokens": 9}):
        wait_until(lambda: engine.started == 1)
        sock.shutdown(socket.SHUT_WR)
        assert rest(sock) == b""
    wait_until(lambda: server[1].open == 0)
    assert engine.left_early == 1


def test_a_client_that_goes_while_it_still_sends_costs_nothing(base, server, engine, http):
    with connected(base) as sock:
        sock.sendall(
            b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"pro'
        )
        wait_until(lambda: server[1].open == 1)
    wait_until(lambda: server[1].open == 0)
    assert engine.started == 0
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_goes_while_its_prompt_is_made_is_not_waited_for(base, server, engine, path, stream):
    making, made = threading.Event(), threading.Event()

    def make(*_, **__):
        making.set()
        assert made.wait(20)
        return [97]

    engine.tokenizer.encode = engine.tokenizer.encode_pieces = make
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    for _ in leave(base, path, {**prompt, "max_tokens": 5, "stream": stream}):
        assert making.wait(20)
        assert server[1].admission.waiting == 1
    wait_until(lambda: server[1].open == server[1].admission.open == 0)
    made.set()
    assert engine.started == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [b"", b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"], ids=["alone", "with another behind it"])
@pytest.mark.parametrize("headers", ["", UPGRADE], ids=["as usual", "upgrade"])
def test_a_client_that_goes_while_it_waits_leaves_the_queue(base, server, engine, stream, more, headers):
    body = {"prompt": "held", "max_tokens": 5, "stream": stream}
    for sock in leave(base, "/v1/completions", body, headers):
        wait_until(lambda: engine.started == 1)
        sock.sendall(more)
        assert server[1].admission.waiting == 1
    wait_until(lambda: server[1].open == server[1].admission.open == server[1].admission.waiting == 0)
    assert engine.left_early == 1


def test_a_client_that_goes_once_it_has_its_answer_leaves_nothing_undone(base, server, engine):
    for _ in range(20):
        for sock in leave(base, "/v1/completions", {"prompt": "a b", "max_tokens": 3, "stream": True}):
            got = b""
            while not got.endswith(b"0\r\n\r\n"):
                got += sock.recv(65536)
    wait_until(lambda: server[1].open == server[1].admission.open == 0)
    assert (engine.finished, engine.left_early) == (20, 0)


def test_a_download_ends_when_its_client_goes():
    messages = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    async def send(message):
        await asyncio.sleep(0)

    async def download(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})

    assert not asyncio.run(asyncio.wait_for(run_until_disconnect(download, {"method": "GET"}, receive, send), 20))


def test_an_explanation_does_not_wait_for_a_body(base):
    with connected(base) as sock:
        sock.sendall(b"GET /v1/requests/none/explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000000\r\n\r\nx")
        assert sock.recv(100).startswith(b"HTTP/1.1 404")
