"""Recorded sessions against a server: what is sent when, and the figures by session."""

import argparse
import asyncio
import gzip
import json
from dataclasses import astuple

import pytest
from scripted_server import Scripted

from chairlift.bench.client import Target
from chairlift.bench.record import Record
from chairlift.bench.session_alone import Alone, sample
from chairlift.bench.session_load import SessionLoad, SessionRecord
from chairlift.bench.session_report import block, grouped, session_figures
from chairlift.bench.sessions import RecordedSession, SessionTurn
from chairlift.bench.workload import Job
from chairlift.cli import bench_serve, main

BLOCK = 4


def turn(tokens, leaf, think=0.0, **fields):
    return SessionTurn(think, tokens, 2, leaf, calls_tool=False, **fields)


def linear(turns=3, group=0, shared=0):
    """A session whose turn n has n blocks and a word."""
    main_thread = [turn(BLOCK * n + 1, n) for n in range(1, turns + 1)]
    return RecordedSession(BLOCK, [main_thread], [0, *range(turns)], shared, group)


def run(sessions, users=1, longest_think=60.0, duration=None, **settings):
    async def inner():
        server = Scripted()
        async with server.serving() as url:
            load = SessionLoad(Target(url, "/v1/completions", "m"), sessions, longest_think, **settings)
            replays, _ = await load.run(users, duration)
        return replays, server

    return asyncio.run(inner())


def words(body):
    return body["prompt"].split()


def headers(body):
    lines = (line.partition(": ") for line in body["head"].split("\r\n"))
    return {name: value for name, _, value in lines if "session" in name}


def test_a_turn_follows_the_answer_before_it_and_repeats_its_blocks():
    [replay], server = run([linear(3)])
    assert (replay.complete, len(replay.records), server.most_open) == (True, 3, 1)
    first, second, third = map(words, server.bodies)
    assert [len(first), len(second), len(third)] == [5, 9, 13]
    assert third[:8] == second[:8]
    assert second[:4] == first[:4]
    assert third[4:8] != third[:4]
    assert {tuple(headers(body).items()) for body in server.bodies} == {(("x-session-id", "bench-0-0"),)}
    assert [record.requested_tokens for record in replay.records] == [2, 2, 2]
    assert replay.records[0].end <= replay.records[1].due == replay.records[1].admitted


def test_sessions_of_a_group_share_their_first_blocks_and_others_none():
    _, server = run([linear(1, group=1, shared=1), linear(1, group=1, shared=1), linear(1, group=2, shared=1), linear(1)])
    heads = sorted(tuple(words(body)[:4]) for body in server.bodies)
    assert len(set(heads)) == 3


def test_subagents_run_side_by_side_and_the_main_thread_waits():
    main_thread = [turn(5, 1), turn(9, 2, subagents=range(1, 3)), turn(13, 3)]
    session = RecordedSession(BLOCK, [main_thread, [turn(6, 1)], [turn(7, 1), turn(8, 1)]], [0, 0, 1, 2])
    [replay], server = run([session])
    assert replay.complete
    lengths = [len(words(body)) for body in server.bodies]
    assert lengths[0] == 5
    assert sorted(lengths[1:4]) == [6, 7, 8]
    assert lengths[4:] == [9, 13]
    by_length = {len(words(body)): headers(body) for body in server.bodies}
    assert by_length[6] == {"x-session-id": "bench-0-0/1", "x-parent-session-id": "bench-0-0"}
    assert by_length[8] == {"x-session-id": "bench-0-0/2", "x-parent-session-id": "bench-0-0"}
    assert by_length[13] == {"x-session-id": "bench-0-0"}


def test_a_session_is_of_its_tenant_and_tier_with_its_subagents():
    main_thread = [turn(5, 1), turn(9, 2, subagents=range(1, 2)), turn(13, 3)]
    session = RecordedSession(BLOCK, [main_thread, [turn(6, 1)]], [0, 0, 1, 2], tenant="alice", tier="flex")
    _, server = run([session, linear(3)])
    asked = {
        (body.get("service_tier"), "x-tenant-id: alice\r\n" in body["head"], body["head"].count("x-tenant-id")) for body in server.bodies
    }
    assert (len(server.bodies), asked) == (7, {("flex", True, 1), (None, False, 0)})


def test_users_run_all_sessions_once():
    replays, server = run([linear(2) for _ in range(7)], users=3)
    assert sorted(replay.session for replay in replays) == list(range(7))
    assert len(server.bodies) == 14
    assert 1 <= server.most_open <= 3


def test_for_a_duration_sessions_are_run_again_with_other_words():
    replays, server = run([linear(1)], duration=0.3)
    assert len(replays) > 1
    assert len({tuple(words(body)[:4]) for body in server.bodies}) == len(server.bodies)
    assert all(record.end for replay in replays for record in replay.records)


def test_a_failure_ends_its_session_alone(monkeypatch):
    from chairlift.bench import workload

    plain = workload.words
    monkeypatch.setattr(workload, "words", lambda seed, count: "broken" if seed == "bench-0-1 block 2" else plain(seed, count))
    replays, _ = run([linear(3), linear(3)])
    assert [(replay.complete, len(replay.records)) for replay in replays] == [(True, 3), (False, 2)]


def test_for_a_duration_a_user_waits_after_a_session_that_failed(monkeypatch):
    from chairlift.bench import workload

    monkeypatch.setattr(workload, "words", lambda seed, count: "refuse")
    replays, server = run([linear(1)], duration=0.2)
    assert (len(replays), len(server.bodies)) == (1, 1)


def record(ttft, cached=None, failure=""):
    return Record(1.0, times=[1.0 + ttft], end=3.0, prompt_tokens=100, cached_tokens=cached, failure=failure)


REPLAYS = [
    SessionRecord(0, 0.0, 10.0, True, [record(0.5, 0), record(2.0, 90)], "alice", alone=4.0),
    SessionRecord(1, 5.0, 35.0, True, [record(1.0, 60)], "bob", "flex", alone=20.0),
    SessionRecord(0, 10.0, 36.0, False, [record(9.0, failure="HTTP 500")], "alice"),
]


def test_figures():
    replays = REPLAYS
    assert session_figures(replays, 36.0) == {
        "sessions": 3,
        "complete_sessions": 2,
        "sessions_per_hour": 200.0,
        "session_seconds_p50": 30.0,
        "slowdown_mean": 2.0,
        "slowdown_worst": 2.5,
        "longest_wait_s": 2.0,
        "cached_share": 0.5,
    }
    assert replays[0].to_json() == {
        **{"session": 0, "tenant": "alice", "tier": "default", "began": 0.0, "ended": 10.0, "seconds": 10.0, "complete": True},
        **{"requests": 2, "failed": 0, "slowdown": 2.5, "longest_wait": 2.0, "cached_share": 0.45},
    }
    assert replays[2].to_json()["slowdown"] is None
    assert session_figures([], 0.0)["longest_wait_s"] is None


def test_the_text_has_each_tenant_and_the_slowest_sessions():
    lines = [" ".join(line.split()) for line in block(REPLAYS, 36.0).splitlines()]
    assert "Mean slowdown over alone: 2.00" in lines
    assert [line for line in lines if line.startswith(("alice", "bob", "tenant", "flex"))] == [
        "tenant begun completed median (s) slowdown worst longest wait (s) cached (%)",
        "alice 2 1 10.00 2.50 2.50 2.00 45.0",
        "bob 1 1 30.00 1.50 1.50 1.00 60.0",
        "flex 1 1 30.00 1.50 1.50 1.00 60.0",
    ]
    at = lines.index("session tenant tier requests seconds slowdown longest wait (s) cached (%)")
    assert lines[at + 1 : at + 3] == ["0 alice default 2 10.00 2.50 2.00 45.0", "1 bob flex 1 30.00 1.50 1.00 60.0"]
    assert list(grouped(REPLAYS, "tier", 36.0)) == ["default", "flex"]
    many = [SessionRecord(number, 0.0, number + 1.0, True) for number in range(12)]
    alone = block(many, 36.0).splitlines()
    assert alone[-2] == "and 2 more"
    assert [line.split()[:3] for line in alone[-12:-10]] == [["11", "0", "12.00"], ["10", "0", "11.00"]]
    assert "tenant" not in block(many, 36.0)


def test_fresh_tokens_are_those_that_no_earlier_request_had():
    main_thread = [turn(13, 3), turn(18, 4, subagents=range(1, 2))]
    assert RecordedSession(4, [main_thread, [turn(9, 6)]], [0, 0, 1, 2, 3, 0, 5]).fresh_tokens() == [[13, 6], [9]]


def test_alone_a_session_takes_its_gaps_and_the_times_of_its_longest_subagent():
    main_thread = [turn(5, 1), turn(9, 2, think=0.01, subagents=range(1, 3)), turn(13, 3, think=9.0)]
    session = RecordedSession(BLOCK, [main_thread, [turn(6, 1)], [turn(7, 1), turn(8, 1, think=0.01)]], [0, 0, 1, 2])
    [replay], server = run([session], longest_think=0.02, alone=Alone(1.0, prompt_token=10.0, prompt_pair=0.0, output_token=100.0))
    # Each request takes 1 s, and 100 s for its second token. The main thread's prompts have 5 new tokens each, the others' 2, 3 and 4.
    assert replay.alone == pytest.approx(3 * 151.0 + 0.03 + 101.0 * 2 + 70.0 + 0.01)
    assert replay.slowdown == pytest.approx((replay.ended - replay.began) / replay.alone)
    assert [one.slowdown for one in run([session], longest_think=0.0)[0]] == [None], "it is unknown"
    assert not any("final" in body["head"] for body in server.bodies)


def test_times_alone_are_fitted_to_a_replayed_session():
    def answered(prompt, cached, ttft, tokens):
        times = [5.0 + ttft, 5.0 + ttft + 0.5 * (tokens - 1)]
        return Record(5.0, times=times, prompt_tokens=prompt, cached_tokens=cached, output_tokens=tokens)

    # 0.5 s, 0.02 s for each computed token, and 0.001 s for each pair: a prompt of n computed tokens has n²/2 pairs.
    reported = [answered(100, 0, 7.5, 3), answered(140, 120, 3.5, 5), answered(200, 140, 11.9, 1), answered(60, 60, 0.5, 1)]
    fitted = Alone.fitted(reported, [7, 8, 9, 10])
    assert astuple(fitted) == pytest.approx((0.5, 0.02, 0.001, 0.5))
    assert fitted.request(200, 60, 3) == pytest.approx(12.9)
    silent = [answered(100, None, 7.5, 3), answered(140, None, 3.5, 5), answered(200, None, 11.9, 1)]
    assert astuple(Alone.fitted(silent, [100, 20, 60])) == pytest.approx((0.5, 0.02, 0.001, 0.5))
    falling = Alone.fitted([answered(10, 0, 3.0, 1), answered(30, 0, 1.0, 1)], [10, 30])
    assert astuple(falling) == pytest.approx((2.0, 0.0, 0.0, 0.0)), "no time is below 0"
    steady = Alone.fitted([answered(10, 0, 0.2, 1), answered(20, 0, 0.4, 1)], [10, 20])
    assert astuple(steady) == pytest.approx((0.0, 0.02, 0.0, 0.0)), "of equal errors the fewest weights count"


def test_the_sample_is_of_the_median_session_and_shares_nothing():
    chosen = sample([linear(9), linear(3, shared=1), linear(5, group=2, shared=2)])
    assert ([len(thread) for thread in chosen.threads], chosen.shared) == ([5], 0)
    few = RecordedSession(BLOCK, [[turn(25, 1), turn(5, 1)]], [0, 0])
    assert sample([linear(9), linear(3), few]) == few, "the median is that of the longest prompts"
    branched = RecordedSession(BLOCK, [[turn(5, 1), turn(9, 2, subagents=range(1, 2))], [turn(6, 1)]], [0, 0, 1])
    assert [[len(one.subagents) for one in thread] for thread in sample([branched]).threads] == [[0, 0]]


@pytest.fixture
def trace(tmp_path):
    rows = [[0, float(n), 0.0, 0, 0, 0, 4 * n + 1, 2, 1, 0, 0, int(n > 1), n - 1, [n, 1]] for n in range(1, 4)]
    path = tmp_path / "agents.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"block": 4, "threads": [{}], "requests": rows}).encode() + b"\n"))
    return path


def test_the_command_reports_and_saves_sessions(trace, tmp_path, capsys):
    server = Scripted()
    with server.elsewhere() as url:
        flags = ["--users", "2", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--num-warmups", "0"]
        assert main.main(["bench", "serve", "--base-url", url, "--sessions", str(trace), *flags]) == 0
    report = capsys.readouterr().out
    assert "1 session for 2 users" in report
    assert "Sessions completed:                      1" in report
    saved = json.loads((tmp_path / "r.json").read_text())
    assert [replay["requests"] for replay in saved["replays"]] == [3]
    assert (saved["users"], saved["completed"], saved["complete_sessions"]) == (2, 3, 1)
    assert saved["slowdown_worst"] == saved["replays"][0]["slowdown"] > 0
    assert saved["tenants"][""]["complete_sessions"] == saved["tiers"]["default"]["complete_sessions"] == 1
    # It is replayed alone before, with other words.
    alone, replayed = server.bodies[:3], server.bodies[3:]
    assert [headers(body) for body in alone[:2]] == [{"x-session-id": "alone-0-0"}] * 2
    assert headers(alone[2]) == {"x-session-id": "alone-0-0", "x-dynamo-session-final": "true"}
    assert [headers(body) for body in replayed] == [{"x-session-id": "bench-0-0"}] * 3
    assert not set(alone[0]["prompt"].split(" ", 4)[:4]) <= set(replayed[0]["prompt"].split())


def test_requests_without_a_session_are_sent_beside_them():
    async def inner(duration=None):
        server = Scripted()
        async with server.serving() as url:
            load = SessionLoad(Target(url, "/v1/completions", "m"), [linear(3)], 0.0)
            beside = [Job(2, 3, text="one two", due=due) for due in (0.0, 0.02, 9.0)][: None if duration else 2]
            replays, _ = await load.run(1, duration, beside)
        return replays, load.others, server

    replays, others, server = asyncio.run(inner())
    assert [len(replay.records) for replay in replays] == [3]
    assert [(record.ok, record.due, record.output_tokens) for record in others] == [(True, 0.0, 3), (True, 0.02, 3)]
    assert [headers(body) for body in server.bodies if body["prompt"] == "one two"] == [{}, {}]
    assert others[1].sent >= 0.02
    _, others, _ = asyncio.run(inner(duration=0.1))
    assert [record.due for record in others] == [0.0, 0.02], "the last is due after the end"


def test_the_command_reports_requests_without_a_session(trace, tmp_path, capsys):
    table = tmp_path / "others.csv"
    table.write_text("arrival_s,prompt_tokens,output_tokens,client\n0,3,2,carol\n0.01,4,2,\n")
    server = Scripted()
    with server.elsewhere() as url:
        flags = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--num-warmups", "0", "--users", "1"]
        command = ["bench", "serve", "--base-url", url, "--sessions", str(trace), "--dataset-path", str(table), *flags]
        assert main.main(command) == 0
    report = capsys.readouterr().out
    assert "Beside them 2 requests without a session: at the trace's times" in report
    assert "Successful requests:                     5 " in report
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["completed"], saved["without_session"]["completed"], saved["complete_sessions"]) == (5, 2, 1)
    lines = [line.split() for line in report.splitlines()]
    assert [line[:2] for line in lines[lines.index(["Sessions".center(50, "-")]) :] if line[:1] == ["2"]] == [["2", "0"]]
    tenants = {len(words(body)): "x-tenant-id: carol\r\n" in body["head"] for body in server.bodies if not headers(body)}
    assert tenants == {3: True, 4: False}


def test_a_rate_beside_sessions_lasts_for_their_duration(trace, monkeypatch):
    class Seen(Exception):
        pass

    def seen(*_, **load):
        raise Seen(load["beside"], load["max_concurrency"])

    monkeypatch.setattr("chairlift.cli.bench_sessions.measure_sessions", seen)
    with Scripted().elsewhere() as url:
        known = ["serve", "--base-url", url, "--sessions", str(trace)]
        parser = argparse.ArgumentParser()
        bench_serve.add_parser(parser.add_subparsers())

        def beside(*flags):
            args = parser.parse_args([*known, *flags])
            with pytest.raises(Seen) as caught:
                args.run(args)
            return caught.value.args

        jobs, limit = beside("--request-rate", "2", "--duration", "30", "--random-input-len", "5")
        assert (len(jobs), limit, {job.prompt_tokens for job in jobs}) == (60, None, {5})
        assert 0 <= jobs[0].due < jobs[-1].due < 30
        assert len(beside("--request-rate", "2")[0]) == 100
        jobs, limit = beside("--max-concurrency", "3", "--num-prompts", "7")
        assert ([job.due for job in jobs], limit) == ([None] * 7, 3)
        assert beside("--duration", "30") == ([], None)


@pytest.mark.parametrize(("flags", "says"), [(["--header", "X-Tenant-Id=bob"], "name their tenants"), ([], "is no name of a tenant")])
def test_tenants_that_cannot_be_named(trace, tmp_path, capsys, flags, says):
    session = json.loads(gzip.decompress(trace.read_bytes())) | {"tenant": "alice"}
    (tmp_path / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    (tmp_path / "others.csv").write_text("arrival_s,prompt_tokens,output_tokens,client\n0,3,2,a b\n")
    with Scripted().elsewhere() as url:
        command = ["bench", "serve", "--base-url", url, "--sessions", str(tmp_path / "sessions.jsonl"), *flags]
        assert main.main([*command, "--dataset-path", str(tmp_path / "others.csv")]) == 2
    assert says in capsys.readouterr().err


def test_slowdowns_are_unknown_if_the_session_alone_fails(trace, tmp_path, capsys, monkeypatch):
    from chairlift.bench import workload

    plain = workload.words
    monkeypatch.setattr(workload, "words", lambda seed, count: "broken" if seed == "alone-0-0 block 2" else plain(seed, count))
    with Scripted().elsewhere() as url:
        assert main.main(["bench", "serve", "--base-url", url, "--sessions", str(trace), "--num-warmups", "0"]) == 0
    report = capsys.readouterr().out
    assert "Mean slowdown over alone:                -" in report
    assert "Note: Slowdowns are unknown" in report


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--users", "2"], "--users has no effect here: it is for --sessions"),
        (["--sessions", "x", "--processes", "2"], "--processes has no effect here"),
        (["--sessions", "x", "--dataset-name", "trace"], "--dataset-name trace needs --dataset-path"),
    ],
)
def test_flags_that_contradict(arguments, says, capsys):
    assert main.main(["bench", "serve", *arguments]) != 0
    assert says in capsys.readouterr().err
