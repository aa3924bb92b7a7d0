"""Signals to a whole server and to its engine, in the middle of load."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from served import Served, bare, served, until

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "Hello"}]
LOAD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "a", "ignore_eos": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 3, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "ignore_eos": True}),
    ("/v1/messages", {"messages": MESSAGES}),
    ("/v1/responses", {"input": "Hello"}),
)
PROMPTS = 6
"""How many prompts these have together."""
LONGEST = {"/v1/responses": "max_output_tokens"}
"""What the field is called that says how long an answer may be, where it is not `max_tokens`."""
TOKENS = 2000
ROWS = ("--max-num-seqs", "32")
"""Enough for the load below to run all at a time."""


Requests = list[tuple[str, bool, Future[httpx.Response]]]
"""Requests: each one's path, whether it streams, and its answer."""


@contextmanager
def load(server: Served) -> Iterator[tuple[Requests, Callable[[], None]]]:
    """Long requests of all kinds, once all of them run, and what lets them end, which they can't before."""
    with ThreadPoolExecutor(len(LOAD) * 2) as threads, server.held() as release:
        requested = []
        for path, body in LOAD:
            for stream in (False, True):
                longest = {LONGEST.get(path, "max_tokens"): TOKENS}
                requested.append((path, stream, threads.submit(server.http.post, path, json={**body, **longest, "stream": stream})))
        until(lambda: server.state()["http"] == {"open": len(requested), "waiting": 0})
        yield requested, release


def last(stream: str) -> Any:
    """The last event of a stream that has data."""
    return json.loads([line for line in stream.splitlines() if line.startswith("data: {")][-1][len("data: ") :])


def first_tokens(server: Served) -> int:
    """How many prompts have got the first token of their answer."""
    text = server.http.get("/metrics").text
    return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith("chairlift_time_to_first_token_seconds_count"))


def check_complete(answers: list[tuple[str, bool, httpx.Response]]) -> None:
    """Every answer of the load has its end."""
    for path, stream, answer in answers:
        assert answer.status_code == 200, answer.text
        if path == "/v1/messages":
            assert '"stop_reason":"max_tokens"' in answer.text
            assert not stream or last(answer.text) == {"type": "message_stop"}
        elif path == "/v1/responses":
            assert '"reason":"max_output_tokens"' in answer.text
            assert not stream or last(answer.text)["type"] == "response.incomplete"
        else:
            assert '"finish_reason":"length"' in answer.text
            assert answer.text.endswith("data: [DONE]\n\n") == stream


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(*ROWS) as one:
        yield one


def test_an_engine_that_is_killed_is_replaced_and_no_request_is_lost(server):
    golden, engine = server.answer(), server.engine()
    whole = [server.http.post(path, json={**body, LONGEST.get(path, "max_tokens"): TOKENS}).json() for path, body in LOAD]
    begun = first_tokens(server)
    with load(server) as (requested, release):
        until(lambda: first_tokens(server) == begun + 2 * PROMPTS)
        os.kill(engine, signal.SIGKILL)
        until(lambda: server.status("/ready") == 503)
        release()
        answers = [(path, stream, answer.result()) for path, stream, answer in requested]
    check_complete(answers)
    assert [bare(answer.json()) for _, stream, answer in answers if not stream] == [bare(one) for one in whole]
    assert server.engine() != engine
    assert server.status("/health") == 200
    assert server.answer() == golden
    assert server.state()["http"] == {"open": 0, "waiting": 0}


def test_sigterm_loses_no_request():
    with served(*ROWS, "--shutdown-timeout", "1000") as server:
        with load(server) as (requested, release):
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.status("/ready") == 503)
            release()
            answers = [(path, stream, answer.result()) for path, stream, answer in requested]
        assert server.process.wait(60) == 0
    check_complete(answers)


def test_a_second_sigterm_ends_the_server_now():
    with served(*ROWS, "--shutdown-timeout", "1000") as server:
        engine = server.engine()
        with load(server) as (requested, _):
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.status("/ready") == 503)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 1
            for path, stream, answer in requested:
                if stream:
                    reported = last(answer.result().text)
                    assert (reported["response"]["error"] if "response" in reported else reported["error"])["message"], path
                else:
                    assert answer.result().status_code == 503
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)
