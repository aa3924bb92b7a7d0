"""`chairlift serve --replicas 2`: an engine that dies, hangs or is restarted costs clients nothing."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dying_engine
import pytest
from resumable import KINDS, PROMPT, ask, metric, order, requested
from served import Served, served, until

pytestmark = pytest.mark.slow

FLAGS = (
    "--replicas",
    "2",
    "--routing",
    "round-robin",
    "--max-num-seqs",
    "12",
    "--num-kv-blocks",
    "200",
    "--threads",
    "1",
    "--served-model-name",
    "tiny",
)


def steps(server: Served) -> list[float]:
    """The steps that each engine has taken."""
    lines = server.http.get("/metrics").text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("chairlift_engine_steps_total")]


def settled(server: Served) -> list[float]:
    """The steps that each engine has taken, once no report of earlier ones is on its way."""
    seen: list[list[float]] = []

    def same() -> bool:
        time.sleep(0.3)
        seen.append(steps(server))
        return seen[-2:-1] == seen[-1:]

    until(same)
    return seen[-1]


def states(server: Served) -> list[str]:
    return [one["state"] for one in server.replicas()]


@pytest.fixture(scope="module")
def server(byte_model: Path) -> Iterator[Served]:
    (byte_model / "chat_template.jinja").write_text("{% if tools %}{# <tool_call> #}{% endif %}{{ messages[-1].content }}")
    flags = *FLAGS, "--shutdown-timeout", "0.1", "--log-level", "info"
    with served(str(byte_model), *flags, script=dying_engine.__file__, load_format="dummy") as one:
        until(lambda: states(one) == ["ready", "ready"])
        yield one


def test_an_engine_dies_and_its_streams_go_on_in_the_other(server: Served) -> None:
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        expected = requested(server, threads)
        for kill in range(4):
            until(lambda: states(server) == ["ready", "ready"])
            order(server, step=3 + 5 * kill, where=("launch", "send", "half", "send")[kill])
            assert requested(server, threads) == expected, kill
    assert metric(server, "engine_restarts_total") == 4
    assert metric(server, "requests_resumed_total") > 4
    assert "0 requests waited for it" in server.log()
    steps = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith("chairlift_engine_steps_total")]
    assert [line.partition("{")[2].partition(",")[0] for line in steps] == ['engine="0"', 'engine="1"']


def test_an_engine_that_hangs_does_not_hang_the_other(server: Served) -> None:
    until(lambda: states(server) == ["ready", "ready"])
    path, body = KINDS["seeded"]
    expected, lost = ask(server, path, body), server.log().count("lost its engine")
    os.kill(server.engines()[0], signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        assert [one.result() for one in [threads.submit(ask, server, path, body) for _ in range(2)]] == [expected] * 2
    assert server.log().count("lost its engine") == lost + 1
    assert "the engine's process was stopped by a signal: killing its process" in server.log()


def test_requests_of_a_session_go_to_one_engine(server: Served) -> None:
    until(lambda: states(server) == ["ready", "ready"])
    for session, engines in (("mine", 1), (None, 2)):
        before = settled(server)
        for number in range(4):
            headers = {} if session is None else {"x-session-id": session}
            assert server.http.post("/v1/completions", json={**PROMPT, "prompt": f"{number} lifts"}, headers=headers).status_code == 200
        until(lambda before=before, engines=engines: sum(now > then for now, then in zip(steps(server), before, strict=True)) == engines)


def test_a_rolling_restart_under_load_fails_no_request(server: Served) -> None:
    until(lambda: states(server) == ["ready", "ready"])
    before = set(server.engines())
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        expected = requested(server, threads)
        order(server, step=10**9, where="launch")  # only makes steps slow
        assert server.administer("/models/restart", {"model": "tiny"}).status_code == 202
        rounds = 0
        while not (before.isdisjoint(server.engines()) and states(server) == ["ready", "ready"]):
            assert requested(server, threads) == expected
            rounds += 1
    (server.directory / "gate").unlink()
    assert rounds > 1
    assert 'finished_reason="error",model_name="tiny"} 0.0' in server.http.get("/metrics").text
    assert server.log().count("restarting engine ") == 2


def test_a_live_sequence_stays_in_its_engine_and_outlives_it(server: Served) -> None:
    until(lambda: states(server) == ["ready", "ready"])
    sequence = server.http.post("/v1/sequences", json={"prompt": PROMPT["prompt"]}).json()["id"]
    fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def generate() -> str:
        reported = server.http.post(f"/v1/sequences/{sequence}/generate", json=fields)
        assert reported.status_code == 200, reported.text
        return str(reported.json()["choices"][0]["text"])

    text = generate()
    for pid in server.engines():
        os.kill(pid, signal.SIGKILL)
    text += generate()
    assert text == server.answer(PROMPT["prompt"], max_tokens=16, ignore_eos=True)
