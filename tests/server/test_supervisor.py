import contextlib
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_server import metric, own_process, running, status
from server_here import wait_until

from chairlift.server.engine_keeper import MAX_RESTART_DELAY, restart_delay
from chairlift.server.http.sockets import PortTaken, open_port

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def stream(client, tokens, prompt="paused"):
    """The lines of a stream that has begun, of a request that pauses after two tokens until SIGUSR1."""
    with client.stream("POST", "/v1/completions", json={"prompt": prompt, "max_tokens": tokens, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


@pytest.fixture
def hangup():
    """Lets SIGHUP reach children, also where nohup started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_signal_lets_streams_finish_and_turns_new_requests_away(hangup):
    with running() as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        with stream(client, 150) as lines:
            process.send_signal(signal.SIGHUP)  # as when a terminal is closed
            wait_until(lambda: status(client, "/ready") == 503)
            process.send_signal(signal.SIGHUP)  # the shell and the kernel both send it
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
            with stream(client, 2000, "paused dies3") as lines:
                process.send_signal(signal.SIGUSR1)
                assert '"code":"engine_dead"' in [line for line in lines if line][-1]
        wait_until(lambda: status(client, "/ready") == 200)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).json()["choices"][0]["text"] == "a a a "
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log = process.stderr.read()
    assert log.count("died: restarting it") == (2 if loads == "well" else 3)
    assert log.count("restarting it now") == 1
    assert ("could not be started: ModelNotFound: there is no such model" in log) == (loads == "limping")


def test_each_pause_before_another_start_is_longer():
    assert [restart_delay(failures) for failures in range(8)] == [0, 1, 2, 4, 8, 16, 32, MAX_RESTART_DELAY]


def test_sigterm_under_load_loses_no_request():
    with running() as (process, client), ThreadPoolExecutor(12) as threads:
        wait_until(lambda: status(client, "/ready") == 200)
        body = {"prompt": "paused", "max_tokens": 100}
        requested = [threads.submit(client.post, "/v1/completions", json={**body, "stream": i % 2 == 0}) for i in range(12)]
        wait_until(lambda: metric(client.get("/metrics").text, "time_to_first_token_seconds_count") == 12)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: status(client, "/ready") == 503)
        process.send_signal(signal.SIGUSR1)
        answers = [answer.result() for answer in requested]
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
"""What makes the engine hang in a step, as a token."""


def test_an_engine_that_is_killed_under_load_ends_what_has_begun_and_serves_again(tmp_path):
    with own_process(tmp_path, "process") as (_, client, engine), contextlib.ExitStack() as open_streams:
        endless = {"prompt": [1000], "max_tokens": 1_000_000}
        body = {**endless, "stream": True}
        streams = [open_streams.enter_context(client.stream("POST", "/v1/completions", json=body)).iter_lines() for _ in range(3)]
        for lines in streams:
            assert next(lines).startswith("data: {")
        first = engine()
        os.kill(first, signal.SIGKILL)
        for lines in streams:
            assert '"code":"engine_dead"' in [line for line in lines if line][-1]
        wait_until(lambda: status(client, "/ready") == 200)
        assert engine() != first
        assert status(client, "/health") == 200
        body = client.post("/v1/completions", json={**endless, "max_tokens": 5}).json()
        assert body["usage"]["completion_tokens"] == 5


def test_a_stopped_engine_is_replaced(tmp_path):
    with own_process(tmp_path, "process") as (_, client, engine):
        first = engine()
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: status(client, "/health") == 503)
        assert status(client, "/live") == 200
        wait_until(lambda: status(client, "/health") == 200)
        assert engine() != first


def test_a_stuck_step_is_named_dumped_once_and_ended(tmp_path):
    with own_process(tmp_path, "killed") as (process, client, engine), ThreadPoolExecutor(1) as threads:
        first = engine()
        requested = threads.submit(client.post, "/v1/completions", json={"prompt": [HANGING], "max_tokens": 5})
        wait_until(lambda: status(client, "/health") == 503)
        body = client.get("/health").json()
        assert (body["stage"], status(client, "/ready")) == ("run", 503)
        assert "at stage 'run'" in body["reason"]
        assert (requested.result().status_code, requested.result().json()["error"]["code"]) == (503, "engine_dead")
        wait_until(lambda: status(client, "/ready") == 200)
        assert engine() != first
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log = process.stderr.read()
    assert log.count("; its threads:") == 3  # once for each engine that had the request
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


def test_a_client_whose_machine_is_gone_is_noticed_in_two_minutes():
    with open_port("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
            assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [60, 15, 4]


@pytest.mark.parametrize(("host", "says"), [("127.0.0.1", "--port 0 takes any free port"), ("192.0.2.1", "an address of this machine")])
def test_a_remedy_is_told_that_helps(host, says):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortTaken, match=says):
        open_port(host, other.getsockname()[1])
