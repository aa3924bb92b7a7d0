import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_async_engine import wait_until

from chairlift.server.door.port import PortTaken, open_port
from chairlift.server.life import LONGEST_PAUSE, pause_after


@contextlib.contextmanager
def running(shutdown_timeout=30, loads="well", **environment):
    """A server in a process: yields the process and a client of it."""
    with open_port("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("serve_fake.py")), str(port), str(shutdown_timeout), loads]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
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
    """The lines of a stream that has begun, of a request that pauses after two tokens until SIGUSR1."""
    with client.stream("POST", "/v1/completions", json={"prompt": "paused", "max_tokens": tokens, "stream": True}) as response:
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
            process.send_signal(signal.SIGUSR1)
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
        with stream(client, 9) as lines:
            process.send_signal(signal.SIGTERM)
            if signals == 2:
                wait_until(lambda: status(client, "/ready") == 503)
                process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert '"code":"shutting_down"' in rest[-1]
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


@pytest.mark.parametrize("loads", ["well", "limping"])
def test_a_dead_engine_is_started_again(loads):
    with running(loads=loads) as (process, client):
        for _ in range(2):
            wait_until(lambda: status(client, "/ready") == 200)
            answered = client.post("/v1/completions", json={"prompt": "die"})
            assert (answered.status_code, answered.json()["error"]["code"]) == (503, "engine_dead")
        wait_until(lambda: status(client, "/ready") == 200)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).json()["choices"][0]["text"] == "a a a "
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log = process.stderr.read()
    assert log.count("the engine has ended: starting it again") == (2 if loads == "well" else 3)
    assert log.count("starting it again now") == 1
    assert ("could not be started: ModelNotFound: there is no such model" in log) == (loads == "limping")


def test_each_pause_before_another_start_is_longer():
    assert [pause_after(failures) for failures in range(8)] == [0, 1, 2, 4, 8, 16, 32, LONGEST_PAUSE]


def test_sigterm_under_load_loses_no_request():
    with running() as (process, client), ThreadPoolExecutor(12) as threads:
        wait_until(lambda: status(client, "/ready") == 200)
        body = {"prompt": "paused", "max_tokens": 100}
        asked = [threads.submit(client.post, "/v1/completions", json={**body, "stream": i % 2 == 0}) for i in range(12)]
        wait_until(lambda: gauge(client.get("/metrics").text, "time_to_first_token_seconds_count") == 12)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: status(client, "/ready") == 503)
        process.send_signal(signal.SIGUSR1)
        answers = [answer.result() for answer in asked]
        assert process.wait(20) == 0
    assert [answer.status_code for answer in answers] == [200] * 12
    assert all('"finish_reason":"length"' in answer.text for answer in answers)
    assert all(("data: [DONE]" in answer.text) == (i % 2 == 0) for i, answer in enumerate(answers))


def test_a_signal_ends_a_download_at_once():
    with running(loads="download") as (process, client):
        wait_until(lambda: status(client, "/live") == 200)
        assert client.get("/health").json() == {"status": "unhealthy", "reason": "the model is still loading"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


HANGING = 900_004
"""What makes the fake engine hang in a step, as a token."""


@contextlib.contextmanager
def own_process(tmp_path, loads):
    """A ready server whose engine has a process of its own, and what tells that process's id."""
    file = tmp_path / "pid"
    with running(loads=loads, FAKE_ENGINE_HURRY="1.0", FAKE_ENGINE_PID=str(file)) as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        yield process, client, lambda: int(file.read_text())


def test_an_engine_that_is_killed_under_load_fails_its_requests_and_serves_again(tmp_path):
    with own_process(tmp_path, "process") as (_, client, engine), ThreadPoolExecutor(6) as threads:
        endless = {"prompt": [1000], "max_tokens": 1_000_000_000}

        def ask(i):
            return client.post("/v1/completions", json={**endless, "stream": i >= 3}, headers={"x-request-id": f"load-{i}"})

        asked = [threads.submit(ask, i) for i in range(6)]
        for i in range(6):
            wait_until(lambda i=i: status(client, f"/v1/requests/load-{i}/explain") == 200)
        first = engine()
        os.kill(first, signal.SIGKILL)
        for i, answer in enumerate(asked):
            told = answer.result()
            assert told.status_code == (503 if i < 3 else 200)
            last = told.text.rstrip().split("data: ")[-1]
            assert json.loads(last)["error"]["code"] == "engine_dead"
        wait_until(lambda: status(client, "/ready") == 200)
        assert engine() != first
        assert status(client, "/health") == 200
        body = client.post("/v1/completions", json={**endless, "max_tokens": 5}).json()
        assert body["usage"]["completion_tokens"] == 5


def gauge(text, name):
    """The value of a metric that has no labels of its own."""
    [line] = [line for line in text.splitlines() if line.startswith(f"chairlift_{name}{{")]
    return float(line.split()[-1])


def test_a_stopped_engine_is_unhealthy_until_it_goes_on(tmp_path):
    with own_process(tmp_path, "process") as (_, client, engine):
        os.kill(engine(), signal.SIGSTOP)
        wait_until(lambda: status(client, "/health") == 503)
        body = client.get("/health").json()
        assert (body["status"], body["stage"]) == ("unhealthy", "process")
        assert body["seconds"] > 0
        assert "has not answered for" in body["reason"]
        refused = client.get("/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stuck")
        assert status(client, "/live") == 200
        os.kill(engine(), signal.SIGCONT)
        wait_until(lambda: status(client, "/health") == 200)
        assert status(client, "/ready") == 200


def test_a_stuck_step_is_named_dumped_once_and_ended(tmp_path):
    with own_process(tmp_path, "killed") as (process, client, engine), ThreadPoolExecutor(1) as threads:
        first = engine()
        asked = threads.submit(client.post, "/v1/completions", json={"prompt": [HANGING], "max_tokens": 5})
        wait_until(lambda: status(client, "/health") == 503)
        body = client.get("/health").json()
        assert (body["stage"], status(client, "/ready")) == ("run", 503)
        assert "at stage 'run'" in body["reason"]
        assert (asked.result().status_code, asked.result().json()["error"]["code"]) == (503, "engine_dead")
        wait_until(lambda: status(client, "/ready") == 200)
        assert engine() != first
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log = process.stderr.read()
    assert log.count("; its threads:") == 1
    assert "the engine is still stuck in 'run': killing its process" in log


def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{port}"):
            open_port("127.0.0.1", port)
    with open_port("127.0.0.1", 0) as first, pytest.raises(PortTaken):  # that server is still loading
        open_port("127.0.0.1", first.getsockname()[1])
    with pytest.raises(PortTaken):
        open_port("no.such.host.invalid", 1)
