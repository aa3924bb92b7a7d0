"""Answers go on after their engine has died: clients get what an undisturbed server gives them."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import dying_engine
import pytest
from resumable import KINDS, PROMPT, ask, metric, order, requested
from served import Served, served, until

from chairlift import AsyncEngine, SamplingParams, _core
from chairlift.errors import EngineDead

pytestmark = pytest.mark.slow

KILLS = 9
FLAGS = ("--max-num-seqs", "12", "--num-kv-blocks", "200", "--threads", "1", "--no-enable-prefix-caching", "--served-model-name", "tiny")
WHERE = ("launch", "send", "half")


@pytest.fixture(scope="module")
def model(byte_model: Path) -> Path:
    """The tiny model with a chat template that has tools."""
    (byte_model / "chat_template.jinja").write_text("{% if tools %}{# <tool_call> #}{% endif %}{{ messages[-1].content }}")
    return byte_model


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server records usage and decisions."""
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def server(model: Path, logs: Path) -> Iterator[Served]:
    more = "--usage-log", str(logs / "usage"), "--journal", str(logs / "journal")
    with served(str(model), *FLAGS, *more, script=dying_engine.__file__, load_format="dummy") as one:
        yield one


def records(logs: Path) -> list[dict[str, Any]]:
    """The usage records."""
    return [json.loads(line) for file in (logs / "usage").glob("*.jsonl") for line in file.read_text().splitlines()]


def test_clients_get_the_bytes_of_an_undisturbed_run(server: Served, logs: Path) -> None:
    counted = ("request_success_total", "time_to_first_token_seconds_count", "engine_restarts_total")
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        expected = requested(server, threads)
        until(lambda: len(records(logs)) == len(KINDS) + 1)
        usage = sorted((record["prompt_tokens"], record["output_tokens"]) for record in records(logs))
        finished, first_tokens, restarts = (metric(server, name) for name in counted)
        for kill in range(KILLS):
            order(server, step=2 + 4 * kill, where=WHERE[kill % 3])
            for kind, answer in requested(server, threads).items():
                assert answer == expected[kind], (kind, kill)
    assert metric(server, "requests_resumed_total") > 5 * KILLS, "the requests do not run together"
    # Each request counts once, whatever became of its engines.
    assert [metric(server, name) for name in counted] == [(KILLS + 1) * finished, (KILLS + 1) * first_tokens, restarts + KILLS]
    until(lambda: len(records(logs)) == (KILLS + 1) * (len(KINDS) + 1))
    assert sorted((one["prompt_tokens"], one["output_tokens"]) for one in records(logs)) == sorted(usage * (KILLS + 1))
    resumed = [record["states"] for record in records(logs) if "lost_engine" in record["states"]]
    assert resumed
    assert all("restart" in states for states in resumed)
    for journal in logs.glob("journal*"):
        assert _core.replay(journal.read_bytes())["differs_at"] is None


def test_an_answer_without_a_seed_goes_on_with_its_draws(model: Path) -> None:
    async def answer(kill: bool) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        params = SamplingParams(max_tokens=400, temperature=3, n=2, ignore_eos=True)
        async with AsyncEngine(model=str(model), load_format="dummy", threads=1) as engine:
            stream = await engine.prepare("The chairlift", params)
            assert stream.params.seed is not None
            while not stream.over:
                try:
                    async with aclosing(engine.run(stream)) as outputs:
                        async for output in outputs:
                            tokens.setdefault(output.index, []).extend(output.token_ids)
                            if kill:
                                assert engine.pid is not None
                                os.kill(engine.pid, signal.SIGKILL)
                                kill = False
                except EngineDead:
                    await engine.close()
                    await engine.start()
        return tokens

    disturbed = asyncio.run(answer(kill=True))
    assert [len(disturbed[index]) for index in (0, 1)] == [400, 400]
    assert disturbed == asyncio.run(answer(kill=False))


def test_an_engine_that_is_stopped_is_replaced(server: Served) -> None:
    with ThreadPoolExecutor(len(KINDS) + 1) as threads:
        expected = requested(server, threads)
        order(server, step=9, where="launch", signal=signal.SIGSTOP)
        assert requested(server, threads) == expected
    assert "the engine's process was stopped by a signal: killing its process" in server.log()


def test_the_request_that_kills_engines_fails_alone(server: Served) -> None:
    with ThreadPoolExecutor(len(KINDS) + 2) as threads:
        expected, restarts = requested(server, threads), metric(server, "engine_restarts_total")
        poison = threads.submit(server.http.post, "/v1/completions", json={**PROMPT, "prompt": list(dying_engine.POISON)})
        assert requested(server, threads) == expected
        refused = poison.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    assert "the engine died 3 times in a row while it ran this request" in refused.json()["error"]["message"]
    assert metric(server, "engine_restarts_total") == restarts + 3
    assert server.log().count("was running each of the 3 times that the engine died") == 1


@pytest.mark.parametrize(("resume", "foreign", "goes_on"), [("off", False, False), ("exact", True, False), ("any", True, True)])
def test_which_engine_goes_on(model: Path, resume: str, foreign: bool, goes_on: bool) -> None:
    path, body = KINDS["seeded"]
    with served(str(model), *FLAGS, "--resume", resume, script=dying_engine.__file__, load_format="dummy") as server:
        expected = ask(server, path, body)
        if foreign:
            (server.directory / dying_engine.FOREIGN).touch()
        order(server, step=9, where="send")
        if goes_on:
            assert ask(server, path, body) == expected
            until(lambda: "goes on in an engine with other numerics" in server.log())
        else:
            reported = server.http.post(path, json={**body, "stream": True}).text
            last = [line for line in reported.splitlines() if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
            assert ask(server, path, body, stream=False)["choices"][0]["text"] == expected["/.choices/0.text"]
