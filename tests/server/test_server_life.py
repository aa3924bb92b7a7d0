import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fake_async_engine import wait_until

from chairlift.server.port import PortTaken, open_port


@contextlib.contextmanager
def running(shutdown_timeout=30, loads="well"):
    """A server in a process: yields the process and a client of it."""
    with open_port("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("serve_fake.py")), str(port), str(shutdown_timeout), loads]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def status(client, path):
    """The status of a probe, 0 while nobody listens."""
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return 0


@contextlib.contextmanager
def stream(client, tokens):
    """The lines of a stream that has begun, of a request that takes 10 ms a token."""
    with client.stream("POST", "/v1/completions", json={"prompt": "slow", "max_tokens": tokens, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def test_a_signal_lets_streams_finish_and_turns_new_requests_away():
    with running() as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        with stream(client, 150) as lines:
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: status(client, "/ready") == 503)
            refused = client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert "retry-after" in refused.headers
            assert status(client, "/live") == 200
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(20) == 0
        log = process.stderr.read()
    assert log.count("listening on http://127.0.0.1:") == 1
    assert "/v1\n" in log
    assert '"GET /ready' not in log
    assert '"POST /v1/completions' in log


@pytest.mark.parametrize(("shutdown_timeout", "signals", "code"), [(0.1, 1, 0), (1000, 2, 1)])
def test_streams_that_do_not_finish_end_with_an_error(shutdown_timeout, signals, code):
    with running(shutdown_timeout) as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        with stream(client, 2000) as lines:
            process.send_signal(signal.SIGTERM)
            if signals == 2:
                wait_until(lambda: status(client, "/ready") == 503)
                process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert '"code":"engine_dead"' in rest[-1]
        assert process.wait(20) == code


def test_while_the_model_loads_the_server_answers_probes_and_obeys():
    with running(loads="never") as (process, client):
        wait_until(lambda: status(client, "/live") == 200)
        assert status(client, "/ready") == status(client, "/health") == 503
        assert client.get("/v1/models").status_code == 200
        assert client.get("/metrics").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_model_that_cannot_be_loaded_ends_the_server():
    with running(loads="badly") as (process, _):
        assert process.wait(20) != 0
        assert "there is no such model" in process.stderr.read()


def test_a_dead_engine_ends_the_server():
    with running() as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        answered = client.post("/v1/completions", json={"prompt": "die"})
        assert (answered.status_code, answered.json()["error"]["code"]) == (503, "engine_dead")
        assert process.wait(20) == 1
        assert "the engine has ended" in process.stderr.read()


def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{port}"):
            open_port("127.0.0.1", port)
    with pytest.raises(PortTaken):
        open_port("no.such.host.invalid", 1)
