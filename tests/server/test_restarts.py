"""An engine that ends: what becomes of the requests it had, and of those that come while another one is started."""

import asyncio
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_server import metric, running, status
from scripted_engine import answer
from server_here import wait_until

from chairlift.engine.stats import Stats
from chairlift.server.admission import Admission
from chairlift.server.errors import ApiError
from chairlift.server.keys import Tenant
from chairlift.server.lifecycle import FIRST_START_SECONDS, Lifecycle, ModelState

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
DYING = {"prompt": "once0", "max_tokens": 2}
"""A request that the first engine ends of, and the next one answers."""


def finished(client, reason):
    return metric(client.get("/metrics").text, "request_success_total", f'"{reason}"')


@pytest.fixture
def clock(monkeypatch):
    """A list with the time, in seconds, that the server thinks it is."""
    now = [1000.0]
    monkeypatch.setattr("chairlift.server.lifecycle.time.monotonic", lambda: now[0])
    return now


def restarting(clock, took):
    """The lifecycle of a server whose engine has just ended, and took so many seconds to start."""
    lifecycle = Lifecycle()
    clock[0] += took
    lifecycle.ready()
    lifecycle.engine_ended()
    return lifecycle


def test_the_time_to_come_back_is_what_the_last_start_took(clock):
    lifecycle = restarting(clock, took=8.0)
    assert lifecycle.seconds_until_ready == 8.0
    clock[0] += 6.5
    assert lifecycle.seconds_until_ready == 1.5
    assert lifecycle.refusal().headers == {"retry-after": "2"}
    clock[0] += 5.5  # as overdue as that
    assert lifecycle.seconds_until_ready == 4.0
    lifecycle.start_failed()
    lifecycle.start_scheduled(delay=2.0)
    assert lifecycle.seconds_until_ready == 10.0
    clock[0] += 12.0  # it took longer than the one before
    lifecycle.ready()
    assert lifecycle.seconds_until_ready == 0.0
    lifecycle.engine_ended()
    assert lifecycle.seconds_until_ready == 10.0


def test_a_first_start_is_expected_to_take_a_usual_time_or_as_long_again(clock):
    lifecycle = Lifecycle()
    assert lifecycle.seconds_until_ready == FIRST_START_SECONDS
    clock[0] += 0.3 * FIRST_START_SECONDS
    assert lifecycle.seconds_until_ready == pytest.approx(0.7 * FIRST_START_SECONDS)
    clock[0] += 1.7 * FIRST_START_SECONDS
    assert lifecycle.seconds_until_ready == pytest.approx(2 * FIRST_START_SECONDS)
    assert lifecycle.refusal().headers == {"retry-after": "20"}


def test_a_queue_that_is_full_during_a_restart_waits_for_the_engine_too(clock):
    lifecycle = restarting(clock, took=8.0)
    admission = Admission(1, Stats, lambda: lifecycle.seconds_until_ready)
    admission.ticket(Tenant()).admit()
    with pytest.raises(ApiError) as refused:
        admission.ticket(Tenant()).admit()
    assert (refused.value.status, refused.value.headers) == (503, {"retry-after": "8"})


def test_an_end_counts_once_and_draining_is_final():
    lifecycle = Lifecycle()
    lifecycle.engine_ended()
    assert (lifecycle.state, lifecycle.restarts) == (ModelState.STARTING, 0)
    lifecycle.ready()
    lifecycle.engine_ended()
    lifecycle.engine_ended()
    lifecycle.start_failed()
    assert (lifecycle.state, lifecycle.restarts) == (ModelState.FAILED, 1)
    lifecycle.drain()
    lifecycle.ready()
    assert lifecycle.state is ModelState.DRAINING


def test_nobody_is_held_for_ever(monkeypatch):
    monkeypatch.setattr("chairlift.server.lifecycle.MIN_HOLD_SECONDS", 0.01)
    lifecycle = Lifecycle()
    lifecycle.ready()
    assert asyncio.run(lifecycle.wait_for_engine()) is True
    lifecycle.engine_ended()
    lifecycle.start_failed()
    assert asyncio.run(lifecycle.wait_for_engine()) is False
    assert lifecycle.held_requests == 0


def test_requests_that_come_during_a_restart_are_held_and_served():
    with running(loads="waiting") as (process, client), ThreadPoolExecutor(3) as threads:
        wait_until(lambda: status(client, "/ready") == 200)
        requested = [threads.submit(client.post, COMPLETIONS, json=DYING)]
        wait_until(lambda: status(client, "/ready") == 503)
        reported = client.get("/ready")
        assert reported.json()["error"]["code"] == "engine_dead"
        assert int(reported.headers["retry-after"]) >= 1
        assert status(client, "/live") == 200
        assert (client.get("/dashboard/data").json()["state"], client.get("/dashboard/data").json()["restarts"]) == ("restarting", 1)
        requested += [
            threads.submit(client.post, COMPLETIONS, json={"prompt": "new", "max_tokens": 2, "stream": stream}) for stream in (False, True)
        ]
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200  # which needs no engine
        process.send_signal(signal.SIGUSR2)
        died, whole, stream = [one.result() for one in requested]
        assert [one.status_code for one in (died, whole, stream)] == [200] * 3
        assert died.json()["choices"][0]["text"] == answer("once0", 2)
        assert whole.json()["choices"][0]["text"] == answer("new", 2)
        assert stream.text.endswith("data: [DONE]\n\n")
        text = client.get("/metrics").text
        assert metric(text, "engine_restarts_total") == 1
        assert (finished(client, "length"), finished(client, "error")) == (3, 0)
        assert metric(text, "admission_rejections_total", '"not_ready"') == 0
        assert metric(text, "request_params_n_count") == 3
        assert client.get("/dashboard/data").json()["state"] == "ready"


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("n", [1, 2])
def test_a_whole_answer_begins_anew_and_counts_once(n):
    with running() as (_, client):
        wait_until(lambda: status(client, "/ready") == 200)
        reported = client.post(COMPLETIONS, json={"prompt": ["once3 a", "b"], "max_tokens": 5, "n": n}).json()
        assert [choice["text"] for choice in reported["choices"]] == [answer(one, 5, i) for one in ("once3 a", "b") for i in range(n)]
        assert reported["usage"]["completion_tokens"] == 2 * n * 5
        assert reported["usage"]["prompt_tokens"] == len("once3 ab")
        text = client.get("/metrics").text
        assert metric(text, "engine_restarts_total") == 1
        assert (finished(client, "length"), finished(client, "error"), finished(client, "abort")) == (2 * n, 0, 0)
        assert metric(text, "request_generation_tokens_count") == 2 * n
        assert metric(text, "time_to_first_token_seconds_count") == 2


@pytest.mark.parametrize(("prompt", "lost"), [("once0 x", False), ("once1 x", True), ("once3 x", True)])
def test_a_stream_begins_anew_only_if_nothing_was_sent(prompt, lost):
    with running() as (_, client):
        wait_until(lambda: status(client, "/ready") == 200)
        reported = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 5, "stream": True})
        assert reported.status_code == 200
        if lost:
            *begun, last = events(reported.text)
            assert "".join(event["choices"][0]["text"] for event in begun) == answer(prompt, int(prompt[4]))
            assert last["error"]["code"] == "engine_dead"
        else:
            assert "".join(event["choices"][0]["text"] for event in events(reported.text)) == answer(prompt, 5)


def test_a_request_that_every_engine_ends_of_is_given_up():
    with running() as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        reported = client.post(COMPLETIONS, json={"prompt": "die", "max_tokens": 5})
        assert (reported.status_code, reported.json()["error"]["code"]) == (503, "engine_dead")
        assert int(reported.headers["retry-after"]) >= 1
        wait_until(lambda: status(client, "/ready") == 200)
        text = client.get("/metrics").text
        assert metric(text, "engine_restarts_total") == 3
        assert (finished(client, "error"), metric(text, "admission_rejections_total", '"not_ready"')) == (1, 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        log = process.stderr.read()
    assert len(re.findall(r"request cmpl-\w+ was running each of the 3 times that the engine died", log)) == 1


@pytest.mark.parametrize("deadline", ["deadline_ms", "ttft_deadline_ms"])
def test_a_deadline_goes_on_while_a_request_is_held(deadline):
    with running(loads="waiting") as (_, client):
        wait_until(lambda: status(client, "/ready") == 200)
        reported = client.post(COMPLETIONS, json=DYING | {deadline: 100})
        assert (reported.status_code, reported.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert finished(client, "deadline") == 1


def test_a_client_that_leaves_is_not_held_any_longer():
    with running(loads="waiting") as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        with pytest.raises(httpx.ReadTimeout):
            client.post(COMPLETIONS, json=DYING, timeout=0.5)
        wait_until(lambda: finished(client, "abort") == 1)
        process.send_signal(signal.SIGTERM)  # nobody is left to wait for
        assert process.wait(20) == 0


def test_a_server_that_ends_refuses_those_that_are_held():
    with running(1000, "waiting") as (process, client), ThreadPoolExecutor(1) as threads:
        wait_until(lambda: status(client, "/ready") == 200)
        held_requests = threads.submit(client.post, COMPLETIONS, json=DYING)
        wait_until(lambda: status(client, "/ready") == 503)
        process.send_signal(signal.SIGTERM)
        reported = held_requests.result()
        assert (reported.status_code, reported.json()["error"]["code"]) == (503, "shutting_down")
        assert process.wait(20) == 0


def test_after_a_failed_start_new_requests_are_refused_and_held_ones_wait():
    with running(loads="failing") as (process, client), ThreadPoolExecutor(1) as threads:
        wait_until(lambda: status(client, "/ready") == 200)
        held_requests = threads.submit(client.post, COMPLETIONS, json=DYING)
        wait_until(lambda: client.get("/dashboard/data").json()["state"] == "failed")
        reported = client.post(COMPLETIONS, json={"prompt": "new"})
        assert (reported.status_code, reported.json()["error"]["code"]) == (503, "engine_dead")
        assert int(reported.headers["retry-after"]) >= 1
        assert not held_requests.done()
        process.send_signal(signal.SIGUSR2)
        assert held_requests.result().status_code == 200


@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, "shutting down: SIGTERM"), (signal.SIGINT, "shutting down: SIGINT")])
def test_the_log_says_which_signal_ended_the_server(number, words):
    with running() as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stderr.read().count(words) == 1


def test_the_log_says_which_error_ended_the_server():
    with running(loads="broken") as (process, client):
        wait_until(lambda: status(client, "/ready") == 200)
        reported = client.post(COMPLETIONS, json=DYING)
        assert (reported.status_code, reported.json()["error"]["code"]) == (503, "shutting_down")
        assert process.wait(20) == 1
        assert "RuntimeError: a bug in the server" in process.stderr.read()
