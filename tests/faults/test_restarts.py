"""Plain clients of OpenAI's library, with its default settings, while the engine is killed again and again."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import openai
import pytest
from served import Served, served, until

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"
CLIENTS = 12
KILLS = 3
TOKENS = 40
ROWS = 4
"""Requests that run at a time: the others wait."""
WHOLE = 6
"""Clients that do not stream. They come first, so that no stream has begun when the engine is killed."""


def ask(server: Served, client: int) -> str:
    """What one client gets: the even ones chat, and those from `WHOLE` on stream."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any") as library:
        shared = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
        stream = client >= WHOLE
        if client % 2:
            reported = library.completions.create(prompt=f"client {client}", stream=stream, **shared)
            return "".join(part.choices[0].text for part in (reported if stream else [reported]))
        reported = library.chat.completions.create(messages=[{"role": "user", "content": f"client {client}"}], stream=stream, **shared)
        if not stream:
            return str(reported.choices[0].message.content)
        return "".join(part.choices[0].delta.content or "" for part in reported)


def metric(server: Served, start: str) -> float:
    """The sum of the metrics whose lines start so."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"chairlift_{start}"))


def come(server: Served, threads: ThreadPoolExecutor, clients: range) -> list[Future[str]]:
    """Has the clients ask, one after the other."""
    requested = []
    before = server.admin_state()["http"]["open"]
    for client in clients:
        requested.append(threads.submit(ask, server, client))
        until(lambda: server.admin_state()["http"]["open"] == before + len(requested))
    return requested


@pytest.fixture
def server() -> Iterator[Served]:
    """A server of its own for each test: the pause before a start doubles with each kill."""
    with served("--max-num-seqs", str(ROWS)) as one:
        yield one


@pytest.fixture
def expected(server: Served) -> list[str]:
    """What the clients get from an engine that nobody kills."""
    return [ask(server, client) for client in range(CLIENTS)]


def test_default_clients_lose_nothing_over_three_kills(server, expected):
    served_before, restarts = metric(server, "request_success_total"), metric(server, "engine_restarts_total")
    with ThreadPoolExecutor(CLIENTS) as threads:
        for _ in range(KILLS):
            until(lambda: server.admin_state()["http"]["open"] == 0)  # a stream's last bytes come before its request ends
            with server.held() as release:
                requested = come(server, threads, range(WHOLE + 1))
                until(lambda: server.admin_state().get("running") == ROWS)
                os.kill(server.engine(), signal.SIGKILL)
                until(lambda: server.status("/ready") == 503)
                assert server.status("/live") == 200
                requested += come(server, threads, range(WHOLE + 1, CLIENTS))  # while there is no engine
                until(lambda: server.status("/ready") == 200)
                release()
                assert [one.result() for one in requested] == expected
    until(lambda: server.admin_state()["http"] == {"open": 0, "waiting": 0})
    assert metric(server, "engine_restarts_total") == restarts + KILLS
    assert metric(server, "request_success_total") == served_before + KILLS * CLIENTS  # each of them counts once
    assert metric(server, "admission_rejections_total") == 0


def test_a_client_whose_engine_is_killed_three_times_asks_again(server, expected):
    """The server gives such a request up, and says when to come back. After two times it runs alone, so that it is the only one."""
    with ThreadPoolExecutor(CLIENTS) as threads, server.held() as release:
        requested = come(server, threads, range(ROWS))
        for kill in range(KILLS):
            until(lambda: server.admin_state().get("running") == (ROWS if kill < 2 else 1))  # noqa: B023
            os.kill(server.engine(), signal.SIGKILL)
            until(lambda: server.status("/ready") == 503)
            until(lambda: server.status("/ready") == 200)
        release()
        assert [one.result() for one in requested] == expected[:ROWS]
    assert server.log().count("was running each of the 3 times that the engine died") == 1
