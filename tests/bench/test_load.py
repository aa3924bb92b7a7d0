import asyncio

import pytest
from scripted_server import Scripted

from chairlift.bench import load, processes
from chairlift.bench.client import Target, models
from chairlift.bench.figures import Figures
from chairlift.bench.measure import measure, wait_for, wait_until_ready
from chairlift.bench.workload import Job
from chairlift.errors import ChairliftError, InvalidSetting


def job(text, tokens=4, due=0.0):
    return Job(len(text.split()), tokens, text=text, due=due)


def drive(jobs, max_concurrency=None, endpoint="/v1/completions", **settings):
    """The records of jobs that a scripted server gets, and that server."""

    async def run():
        server = Scripted()
        async with server.serving() as url:
            records, _ = await load.drive(Target(url, endpoint, "m", **settings), jobs, max_concurrency)
        return records, server

    return asyncio.run(run())


def test_each_request_is_sent_as_asked_and_its_answer_read():
    records, server = drive(
        [job("one two", 3), Job(1, 2, text="uno", due=0.0, client="alice")], fields={"ignore_eos": True}, headers={"x-a": "b"}
    )
    assert [(r.ok, r.prompt_tokens, r.output_tokens, len(r.times), r.requested_tokens) for r in records] == [
        (True, 3, 3, 3, 3),
        (True, 2, 2, 2, 2),
    ]
    first, second = sorted(server.bodies, key=lambda body: -body["max_tokens"])
    head = first.pop("head")
    assert first == {
        "model": "m",
        "prompt": "one two",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert head.startswith("POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:")
    assert "\r\nx-a: b\r\n" in head
    assert second["user"] == "alice"
    for record in records:
        assert 0 <= record.due <= record.sent <= record.times[0] <= record.times[-1] <= record.end


def test_chat():
    _, server = drive([job("why")], endpoint="/v1/chat/completions")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "why"}]
    assert "prompt" not in server.bodies[0]


@pytest.mark.slow
def test_failures_are_told_apart_and_are_in_no_latency():
    kinds = {
        "refuse": "HTTP 429",
        "error": "error in the stream",
        "drop": "connection lost",
        "cut": "cut off",
        "garbage": "no HTTP",
        "silent": "timed out",
        "broken": "HTTP 500",
        "torn": "error in the stream",
        "odd": "error in the stream",
        "backwards": "no HTTP",
    }
    records, _ = drive([*map(job, kinds), job("good")], timeout=2.0)
    assert {r.failure for r in records[:-1]} == set(kinds.values())
    assert [r.failure for r in records] == [*kinds.values(), ""]
    assert records[0].detail == "2 requests are waiting, as many as may"
    assert len(records[2].times) == 2  # what came of it before it died
    found = Figures(records)
    assert found.failures == {**dict.fromkeys(kinds.values(), 1), "error in the stream": 3, "no HTTP": 2}
    assert len(found.latencies["ttft"].values) == found.completed == 1
    assert found.output_tokens == 4


def test_where_nobody_listens():
    async def run():
        async with Scripted().serving() as url:
            pass
        return (await load.drive(Target(url), [job("a")]))[0]

    (record,) = asyncio.run(run())
    assert record.failure == "no connection"


def test_connecting_is_the_requests_time_and_no_lateness(monkeypatch):
    connect = asyncio.BaseEventLoop.create_connection

    async def slowly(loop, *arguments, **settings):
        await asyncio.sleep(0.3)
        return await connect(loop, *arguments, **settings)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", slowly)
    (record,), _ = drive([job("a", due=0.05)])
    assert record.ttft >= 0.3
    assert 0 <= record.lag < 0.3


@pytest.mark.slow
def test_several_tokens_in_a_piece():
    (record,), _ = drive([job("three", 9)])
    assert (len(record.times), record.output_tokens) == (3, 9)
    assert record.tpot == pytest.approx((record.times[-1] - record.times[0]) / 8)


@pytest.mark.slow
def test_where_the_server_counts_nothing_pieces_are_tokens():
    (record,), _ = drive([job("untold one", 5)])
    assert (record.output_tokens, record.prompt_tokens, record.counted) == (5, 2, False)


def test_concurrency_is_limited_and_a_request_that_waits_was_due_all_the_same():
    records, server = drive([job("a", due=0.0) for _ in range(20)], max_concurrency=3)
    assert server.most_open == 3
    assert [r.due for r in records] == [0.0] * 20
    assert all(r.admitted >= min(other.end for other in records) for r in records[3:])
    assert all(r.ttft >= r.admitted for r in records)  # the wait is in the latency, whoever made them wait
    assert all(r.lag <= r.ttft - r.admitted for r in records)


def test_without_times_requests_are_due_when_another_ends():
    records, server = drive([job("a", due=None) for _ in range(20)], max_concurrency=2)
    assert server.most_open == 2
    ends = sorted(r.end for r in records)
    assert all(r.due >= ends[index] for index, r in enumerate(records[2:]))
    assert [r.due for r in records] == sorted(r.due for r in records)
    assert [r.admitted for r in records] == [r.due for r in records]


def test_requests_go_out_whatever_has_come_back():
    records, server = drive([job("gather", due=0.0), job("gather", due=0.001)])
    assert all(r.ok for r in records)  # the first waits for the second: a client that waits for answers would hang
    assert server.most_open == 2


@pytest.mark.slow
def test_connections_are_used_again():
    _, server = drive([job("a", due=None) for _ in range(10)], max_concurrency=2)
    assert server.connections == 2
    _, server = drive([job("drop", due=None) for _ in range(3)], max_concurrency=1)
    assert server.connections == 3


def test_two_processes_share_jobs_and_concurrency():
    ends = []
    with (server := Scripted()).elsewhere() as url:
        records, _ = processes.drive(Target(url, model="m"), [job("a", 30, due=i / 1000) for i in range(60)], 3, 2, ends.append)
    assert [r.due for r in records] == [i / 1000 for i in range(60)]
    assert all(r.ok and r.output_tokens == 30 for r in records)
    assert ends == [True] * 60
    assert server.most_open <= 3


def test_more_processes_than_concurrent_requests():
    with pytest.raises(InvalidSetting, match="--processes 3 is more than --max-concurrency 2"):
        processes.drive(Target("http://127.0.0.1:1"), [job("a")], 2, 3)


def test_a_run_is_warmed_up_with_other_prompts_and_a_refusal_ends_it():
    with Scripted().elsewhere() as url:
        run = measure(Target(url, model="m"), [job("untold", 3)])
        assert [r.ok for r in run.records] == [True]
        reported = "The server reports no usage: output tokens are counted as stream events, input tokens as requested."
        assert reported in run.notes  # on a busy machine others say that it was
        with pytest.raises(ChairliftError, match=r"the first request .* failed: no HTTP"):
            measure(Target(url, model="garbage", fields={"prompt": "garbage"}), [job("a")])


def test_a_server_that_still_loads_is_waited_for():
    with (server := Scripted()).elsewhere() as url:
        loading = Target(url, model="m", fields={"prompt": "loading"})
        with pytest.raises(ChairliftError, match="HTTP 503"):
            wait_until_ready(loading, 0)
        wait_until_ready(loading, 60)
        assert len(server.bodies) == 3


def test_what_a_server_lists():
    with Scripted().elsewhere() as url:
        assert wait_for(Target(url), 0) == [{"id": "scripted", "max_model_len": 1000}]
    with pytest.raises(ChairliftError, match="no server at"):
        asyncio.run(models(Target(url)))
