import json
import socket

import pytest
from fake_async_engine import wait_until


def leave(base, path, body):
    """Sends a request, waits for nothing, and goes away."""
    host, port = base.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw
        )
        yield sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "slow"}),
        ("/v1/completions", {"prompt": ["slow", "slow too"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "slow"}]}),
    ],
)
def test_the_engine_stops_when_the_client_goes(base, server, engine, http, path, prompt, stream):
    requests = len(prompt["prompt"]) if isinstance(prompt.get("prompt"), list) else 1
    for _ in leave(base, path, {**prompt, "max_tokens": 2000, "stream": stream}):
        wait_until(lambda: engine.started == requests)
    # 2000 tokens would take 20 s; the request must be gone long before.
    wait_until(lambda: engine.left_early == requests, seconds=5)
    assert engine.finished == 0
    wait_until(lambda: server[1].open == 0)
    assert f'finished_reason="abort",model_name="org/fake-model"}} {requests}.0' in http.get("/metrics").text


def test_a_client_that_goes_while_it_still_sends_costs_nothing(base, server, engine, http):
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"pro')
        wait_until(lambda: server[1].open == 1)
    wait_until(lambda: server[1].open == 0)
    assert engine.started == 0
    assert http.get("/health").status_code == 200
