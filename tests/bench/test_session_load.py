"""Recorded sessions against a server: what is sent when, and the figures by session."""

import asyncio
import gzip
import json

import pytest
from scripted_server import Scripted

from chairlift.bench.client import Target
from chairlift.bench.record import Record
from chairlift.bench.session_load import SessionLoad, SessionRecord, session_figures
from chairlift.bench.sessions import RecordedSession, SessionTurn
from chairlift.cli import main

BLOCK = 4


def turn(tokens, leaf, **fields):
    return SessionTurn(0.0, tokens, 2, leaf, calls_tool=False, **fields)


def linear(turns=3, group=0, shared=0):
    """A session whose turn n has n blocks and a word."""
    main_thread = [turn(BLOCK * n + 1, n) for n in range(1, turns + 1)]
    return RecordedSession(BLOCK, [main_thread], [0, *range(turns)], shared, group)


def run(sessions, users=1, **settings):
    async def inner():
        server = Scripted()
        async with server.serving() as url:
            load = SessionLoad(Target(url, "/v1/completions", "m"), sessions, 60.0)
            replays, _ = await load.run(users, **settings)
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


def test_figures():
    def record(ttft, cached=None, failure=""):
        return Record(1.0, times=[1.0 + ttft], end=3.0, prompt_tokens=100, cached_tokens=cached, failure=failure)

    replays = [
        SessionRecord(0, 0.0, 10.0, True, [record(0.5, 0), record(2.0, 90)]),
        SessionRecord(1, 5.0, 35.0, True, [record(1.0, 60)]),
        SessionRecord(0, 10.0, 36.0, False, [record(9.0, failure="HTTP 500")]),
    ]
    assert session_figures(replays, 36.0) == {
        "sessions": 3,
        "complete_sessions": 2,
        "sessions_per_hour": 200.0,
        "session_seconds_p50": 30.0,
        "longest_wait_s": 2.0,
        "cached_share": 0.5,
    }
    assert replays[0].to_json() == {
        **{"session": 0, "began": 0.0, "ended": 10.0, "complete": True, "requests": 2, "failed": 0},
        **{"longest_wait": 2.0, "cached_share": 0.45},
    }
    assert session_figures([], 0.0)["longest_wait_s"] is None


@pytest.fixture
def trace(tmp_path):
    rows = [[0, float(n), 0.0, 0, 0, 0, 4 * n + 1, 2, 1, 0, 0, int(n > 1), n - 1, [n, 1]] for n in range(1, 4)]
    path = tmp_path / "agents.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"block": 4, "threads": [{}], "requests": rows}).encode() + b"\n"))
    return path


def test_the_command_reports_and_saves_sessions(trace, tmp_path, capsys):
    with Scripted().elsewhere() as url:
        flags = ["--users", "2", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--num-warmups", "0"]
        assert main.main(["bench", "serve", "--base-url", url, "--sessions", str(trace), *flags]) == 0
    report = capsys.readouterr().out
    assert "1 session for 2 users" in report
    assert "Sessions completed:                      1" in report
    saved = json.loads((tmp_path / "r.json").read_text())
    assert [replay["requests"] for replay in saved["replays"]] == [3]
    assert (saved["users"], saved["completed"], saved["complete_sessions"]) == (2, 3, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--users", "2"], "--users has no effect here: it is for --sessions"),
        (["--sessions", "x", "--request-rate", "2"], "--request-rate has no effect here"),
        (["--sessions", "x", "--processes", "2"], "--processes has no effect here"),
        (["--sessions", "x", "--dataset-path", "y"], "--dataset-path has no effect here"),
    ],
)
def test_flags_that_contradict(arguments, says, capsys):
    assert main.main(["bench", "serve", *arguments]) != 0
    assert says in capsys.readouterr().err
