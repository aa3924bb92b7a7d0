"""Batches on a whole server that is killed again and again, and beside online requests."""

import asyncio
import json
import os
import subprocess
import sys

import openai
import pytest
from served import served, until

from chairlift.cli import run_batch
from chairlift.config import EngineConfig
from chairlift.server.config import ServerConfig
from chairlift.server.storage.storage import Storage

REQUESTS, KILLS = int(os.environ.get("BATCH_REQUESTS", "200")), int(os.environ.get("BATCH_KILLS", "3"))
"""`make batch-kills` sets more."""


def line(name, **fields):
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": f"request {name}", **fields}})


def start(client, lines):
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def client_of(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", timeout=600)


@pytest.mark.slow
def test_a_batch_survives_kills_and_answers_each_request_once(tmp_path):
    flags = ("--data-dir", str(tmp_path / "data"), "--max-num-seqs", "16")
    answered = [0]

    def completed(client):
        return client.batches.list().data[0].request_counts.completed

    for kill in range(KILLS):
        with served(*flags) as server, client_of(server) as client:
            if kill == 0:
                batch = start(client, (line(str(number), max_tokens=16) for number in range(REQUESTS)))
            # Many answers can come between two looks.
            wanted = max(REQUESTS * (kill + 1) // (KILLS + 1), answered[-1] + 1)
            until(lambda client=client, wanted=wanted: completed(client) >= wanted, 600)
            answered.append(completed(client))
            server.process.kill()
    with served(*flags) as server, client_of(server) as client:
        assert client.batches.retrieve(batch).request_counts.completed >= answered[-1], "what was answered stays"
        until(lambda: client.batches.retrieve(batch).status == "completed", 600)
        counts = client.batches.retrieve(batch).request_counts
        lines = client.files.content(client.batches.retrieve(batch).output_file_id).text.splitlines()
        files = len(client.files.list(limit=100).data)
    assert answered == sorted(set(answered))
    assert (counts.total, counts.completed, counts.failed, files) == (REQUESTS, REQUESTS, 0, 2)
    assert [json.loads(text)["custom_id"] for text in lines] == [str(number) for number in range(REQUESTS)]
    assert len({json.loads(text)["response"]["body"]["id"] for text in lines}) == REQUESTS


@pytest.mark.slow
def test_online_requests_take_the_slots_of_a_batch(tmp_path):
    with served("--data-dir", str(tmp_path / "data"), "--max-num-seqs", "4") as server, client_of(server) as client:
        with server.held() as release:
            batch = start(client, (line(str(number), max_tokens=100) for number in range(8)))
            until(lambda: server.admin_state()["running"] == 4)
            # All slots are taken by requests that do not end, under the policy fcfs.
            for _ in range(5):
                server.answer(max_tokens=2)
            assert server.admin_state()["preemptions"] > 0
            release()
        until(lambda: client.batches.retrieve(batch).status == "completed")
        assert client.batches.retrieve(batch).request_counts.completed == 8


@pytest.mark.slow
def test_run_batch_answers_a_file_and_names_a_faulty_line(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "chairlift.cli.main", "run-batch", "-i", str(source), "-o", str(target)]
    command += ["--load-format", "none", "--data-dir", str(tmp_path / "data"), "--log-level", "warning"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    other = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    source.write_text("\n".join([*(line(str(number), max_tokens=4) for number in range(20)), json.dumps(other), line("bad", max_tokens=0)]))
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "1 requests failed" in done.stderr) == (1, True), done.stderr
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [*map(str, range(20)), "chat", "bad"]
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 21 + [400]
    first = target.read_text()
    subprocess.run(command, capture_output=True)
    assert target.read_text() == first, "the same input is not run again"
    source.write_text("{\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "line 1: the line is not valid JSON" in done.stderr


@pytest.mark.slow
def test_an_interrupted_run_batch_keeps_what_was_not_answered(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        "\n".join([line("short", max_tokens=1), *(line(str(number), max_tokens=8000, ignore_eos=True) for number in range(8))])
    )
    storage = Storage(tmp_path / "data", 10**9)

    async def interrupt() -> None:
        config, server = EngineConfig(load_format="none"), ServerConfig()
        running = asyncio.create_task(run_batch.answer_file(config, server, storage, source, 0.0))
        while not any(batch.completed for batch in await storage.batches.open()):
            await asyncio.sleep(0.01)
            assert not running.done()
        running.cancel()  # as asyncio.run does at Ctrl-C
        with pytest.raises(asyncio.CancelledError):
            await running
        [batch] = await storage.batches.open()
        assert (batch.completed, batch.failed) == (1, 0)

    asyncio.run(interrupt())
    storage.close()
