"""Sessions in a closed loop: when requests are sent, what the cache finds, and what a session's time is compared with."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from chairlift.bench.sessions import RecordedSession, SessionTurn, read_sessions
from chairlift.bench.traces import TraceRequest
from chairlift.cli import main
from chairlift.errors import InvalidSetting, InvalidTrace
from chairlift.sim.devices import Profile
from chairlift.sim.sessions import SessionsResult, simulate_sessions
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload

BLOCK = 64
# A step takes 10 ms, and a prompt token 0.1 ms.
STEP = StepTime(((0.0, 10_000.0), (1.0, 10_100.0)), decode_seq=-100.0)
SIZES = {"num_kv_blocks": 4000, "block_size": BLOCK, "max_num_batched_tokens": 1024, "max_num_seqs": 64, "max_model_len": 32_768}


def session(turns: int, tokens: int = 1024, think: float = 1.0, first: int = 1024) -> RecordedSession:
    """A conversation without subagents, whose prompts grow by `tokens`."""
    blocks = (first + (turns - 1) * tokens) // BLOCK
    prompts = [first + at * tokens for at in range(turns)]
    made = [SessionTurn(think, prompt, 10, prompt // BLOCK, calls_tool=True) for prompt in prompts]
    return RecordedSession(BLOCK, [made], [0, *range(blocks)])


def run(sessions: list[RecordedSession], users: int, blocks: int = 4000, **settings: object) -> SessionsResult:
    sizes = SIZES | {"num_kv_blocks": blocks}
    return simulate_sessions(sessions, users, model="Llama-3.2-1B", device="cpu", step_time=STEP, **{"duration": 700.0} | sizes | settings)


def test_a_user_alone_takes_the_time_that_a_session_takes_alone() -> None:
    result = run([session(20, think=5.0)], users=1)
    figures = result.figures()
    # 5 s between requests, then 1,024 tokens in a step of 112.4 ms and nine of 10 ms; the first session begins in its middle.
    assert figures["slowdown_worst"] == pytest.approx(1.0, abs=0.02)
    assert figures["ttft_p50_s"] == pytest.approx(0.1124, abs=0.001)
    assert figures["cached_share"] == pytest.approx(1 - 20 / (20 * 21 / 2), abs=0.01)
    assert figures["longest_wait_s"] == pytest.approx(0.1124, abs=0.001)
    assert result.result.refused == []


def test_requests_wait_for_the_answer_before_them() -> None:
    slow = run([session(20, think=0.0)], users=1)
    begun = sorted((int(one["arrived"]), int(one["ended"])) for one in slow.result.requests)
    assert all(ended <= arrived for (_, ended), (arrived, _) in pairwise(begun))


def test_a_cache_for_half_of_the_sessions_finds_little_without_turns() -> None:
    users = 8
    free = run([session(60, think=2.0)], users)
    assert free.figures()["cached_share"] > 0.9
    blocks = free.context_tokens // BLOCK // 2
    half = run([session(60, think=2.0)], users, blocks, session_turns="off")
    assert half.figures()["cached_share"] < 0.6
    assert run([session(60, think=2.0)], users, blocks).figures()["cached_share"] > 0.7, "sessions take turns"
    assert half.figures()["requests_per_s"] < free.figures()["requests_per_s"]
    assert half.figures()["slowdown_mean"] > free.figures()["slowdown_mean"]


def test_a_disk_with_the_contexts_makes_turns_short() -> None:
    users, recorded = 8, [session(60, think=2.0)]
    blocks = run(recorded, users).context_tokens // BLOCK // 2
    # A block of 4 MB takes 6.4 ms to compute, and 0.5 ms to read.
    computed, read = (run(recorded, users, blocks, disk=disk).figures() for disk in (None, 8e9))
    assert read["cached_share"] > computed["cached_share"]
    assert read["requests_per_s"] > 1.1 * computed["requests_per_s"]
    assert read["longest_wait_s"] < computed["longest_wait_s"] / 2
    with pytest.raises(InvalidSetting, match="--disk: the block size of a measured machine is unknown"):
        simulate_sessions(recorded, users, device=Profile(name="here", model="", step=STEP, sizes=SIZES), disk=2e9)


def test_subagents_run_side_by_side_before_the_request_that_waits_for_them() -> None:
    main_thread = [SessionTurn(1.0, 640, 5, 10, calls_tool=True), SessionTurn(1.0, 704, 5, 11, calls_tool=True, subagents=range(1, 3))]
    sub = [SessionTurn(0.0, 320, 50, 5, calls_tool=False)]
    recorded = RecordedSession(BLOCK, [[*main_thread, SessionTurn(1.0, 704, 5, 11, calls_tool=False)], sub, sub], [0, *range(11)])
    result = run([recorded], users=1)
    rows = sorted(result.requests.tolist(), key=lambda row: row[2])
    lengths = [row[6] for row in rows]
    at = lengths.index(640)
    assert lengths[at : at + 5] == [640, 320, 320, 704, 704]
    first, second, main_request = rows[at + 1], rows[at + 2], rows[at + 3]
    assert first[2] == second[2], "they are sent at the same time"
    assert main_request[2] == max(first[5], second[5]) + 1_000_000


@pytest.mark.parametrize("subagents", [1, 4])
def test_of_subagents_side_by_side_the_longest_counts_as_the_time_alone(subagents: int) -> None:
    sub = [SessionTurn(0.0, 320, 600, 5, calls_tool=True) for _ in range(12)]
    main_thread = [SessionTurn(1.0, 640, 20, 10, calls_tool=True) for _ in range(3)]
    main_thread[1] = replace(main_thread[1], subagents=range(1, 1 + subagents))
    recorded = RecordedSession(BLOCK, [main_thread, *[sub] * (subagents - 1), sub[:10]], [0, *range(11)])
    # Steps take the same time for one as for four.
    result = run([recorded], users=1)
    assert result.figures()["slowdown_worst"] == pytest.approx(1.0, abs=0.03)
    assert result.figures()["slowdown_mean"] == pytest.approx(1.0, abs=0.03)


def test_a_short_session_has_its_own_time_alone() -> None:
    # Alone, a session's 12 requests take 0.4 s each with their gaps.
    short = [SessionTurn(0.1, 640, 30, 10, calls_tool=True) for _ in range(12)]
    result = run([RecordedSession(BLOCK, [short], [0, *range(11)])], users=24, max_num_seqs=1, session_turns="off", duration=1000.0)
    whole = [one for one in result.replays() if one["complete"] and one["requests"] == 12]
    alone = 12 * (0.1 + 0.3) + 0.064
    slowdowns = [one["slowdown"] for one in whole if one["slowdown"] is not None]
    assert slowdowns, "they take more than a minute"
    assert slowdowns == pytest.approx([one["seconds"] / alone for one in whole if one["slowdown"] is not None], rel=0.03)


def test_a_request_that_waits_at_the_end_has_a_time_alone() -> None:
    # An answer takes 300 s, and the machine has room for one.
    endless = RecordedSession(BLOCK, [[SessionTurn(0.1, 640, 30_000, 10, calls_tool=True)] * 2], [0, *range(11)])
    figures = run([endless], users=3, max_num_seqs=1, session_turns="off").figures()
    assert 1 < figures["slowdown_worst"] < 10


def test_the_same_arguments_give_the_same_figures_and_a_seed_others() -> None:
    sessions = [session(count) for count in (5, 9, 30, 45)]
    assert run(sessions, 6).figures() == run(sessions, 6).figures()
    assert run(sessions, 6).figures() != run(sessions, 6, seed=1).figures()


def test_a_request_that_never_fits_ends_its_session() -> None:
    result = run([session(20)], users=2, max_model_len=8192)
    assert result.result.refused
    assert not result.sessions["complete"].any()


def test_no_users_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="at least 1"):
        run([session(3)], users=0)


def line(*requests: list[object], threads: list[dict[str, object]] | None = None, **more: object) -> str:
    return json.dumps({"n": 1, "block": 4, "threads": threads or [{"tool_tokens": 8}], "requests": requests, **more})


def row(thread: int, t: float, think: float | None, prompt: int, back: int, shared: int, *runs: int) -> list[object]:
    return [thread, t, think, None, None, "s", prompt, 3, 2, "t", 0, back, shared, *([list(runs)] if runs else [])]


def test_a_session_is_read_with_its_blocks_subagents_and_times(tmp_path: Path) -> None:
    threads = [{"tool_tokens": 8}, {"after": 1, "t": 9.0}]
    rows = [row(0, 0, None, 12, 0, 0), row(1, 5, None, 6, 0, 0), row(0, 11, 6.0, 17, 2, 3), row(0, 30, None, 17, 1, 2, 7, 2)]
    with gzip.open(tmp_path / "agents.jsonl.gz", "wt") as file:
        file.write(line(*rows, threads=threads) + "\n")
    (read,) = read_sessions(tmp_path / "agents.jsonl.gz")
    assert (read.block, read.shared, read.group, read.num_requests) == (4, 2, 8, 4)
    main_thread, sub = read.threads
    assert [(turn.think, turn.prompt_tokens, len(turn.subagents)) for turn in main_thread] == [(0.0, 12, 0), (2.0, 17, 1), (9.0, 17, 0)]
    assert [turn.prompt_tokens for turn in sub] == [6]

    def path(leaf: int) -> list[int]:
        return [*path(read.parents[leaf]), leaf] if leaf else []

    paths = [path(turn.leaf) for turn in main_thread]
    assert [len(one) for one in paths] == [3, 4, 4]
    assert (paths[0], paths[2][:2]) == (paths[1][:3], paths[0][:2])
    assert not set(paths[2][2:]) & set(paths[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no session with three requests"),
        ("[1]\n", "is no session"),
        ("{\n", "is no JSON"),
        (line(row(0, 0, 0, 12, 5, 0)) + "\n", "line 1: is no session .*from 0 to 0"),
        (line(row(0, 0, 0, -1, 0, 0)) + "\n", "line 1"),
        (line(row(7, 0, 0, 12, 0, 0)) + "\n", "line 1"),
        (line(block=0) + "\n", "from 1 to"),
        (line(row(0, 0, 0, 12, 0, 0), tenant="a b") + "\n", "line 1: .*tenant 'a b' is no name"),
        (line(row(0, 0, 0, 12, 0, 0), tenant="x\r\ny: z") + "\n", "line 1: .*is no name"),
        (line(row(0, 0, 0, 12, 0, 0), tier="fast") + "\n", "line 1: .*'fast' is none of priority, default, flex"),
    ],
)
def test_what_is_no_session_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "sessions.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidTrace, match=message):
        read_sessions(file)


def test_the_command_shows_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(0, 2.0 * at, 1.0, 400 + 40 * at, at and 1, at and 100 + 10 * (at - 1)) for at in range(12)]
    (tmp_path / "s.jsonl").write_text(line(*rows) + "\n")
    command = ["simulate", "--sessions", str(tmp_path / "s.jsonl"), "--users", "3", "--duration", "600", "--model", "SmolLM2-135M"]
    assert main.main(command) == 0
    shown = capsys.readouterr().out
    assert "slowdown over alone, mean" in shown
    assert main.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["users"] == 3
    assert main.main([*command, "--disk", "2G"]) == 0
    for flag, value in {"--users": "3", "--disk": "2G"}.items():
        assert main.main(["simulate", "--trace", "none.csv", flag, value]) == 2


def test_sessions_of_a_file_belong_to_tenants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(0, 2.0 * at, 1.0, 400 + 40 * at, at and 1, at and 100 + 10 * (at - 1)) for at in range(12)]
    lines = [line(*rows, tenant="alice", tier="flex"), line(*rows, tenant="bob"), line(*rows)]
    (tmp_path / "s.jsonl").write_text("\n".join(lines) + "\n")
    assert [(one.tenant, one.tier) for one in read_sessions(tmp_path / "s.jsonl")] == [
        ("alice", "flex"),
        ("bob", "default"),
        ("", "default"),
    ]
    command = ["simulate", "--sessions", str(tmp_path / "s.jsonl"), "--users", "3", "--duration", "600", "--model", "SmolLM2-135M"]
    assert main.main(command) == 0
    shown = capsys.readouterr().out
    assert {"alice", "bob", "(none)"} <= {text.split(" ")[0] for text in shown.splitlines()}
    assert {"default", "flex"} <= {text.split(" ")[0] for text in shown.splitlines()}
    assert main.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (set(report["tenants"]), set(report["tiers"])) == ({"alice", "bob", ""}, {"flex", "default"})
    replays = {(one["session"], one["tenant"], one["tier"]) for one in report["replays"]}
    assert replays == {(0, "alice", "flex"), (1, "bob", "default"), (2, "", "default")}
    for one in report["replays"]:
        assert one["seconds"] == pytest.approx(one["ended"] - one["began"])
        assert one["slowdown"] is None, "they take less than a minute"


def test_replays_have_the_slowdowns_of_the_figures() -> None:
    result = run([session(20, think=5.0)], users=2)
    report = [one["slowdown"] for one in result.replays() if one["slowdown"] is not None]
    assert report == result.slowdowns.tolist()
    assert max(report) == result.figures()["slowdown_worst"]
    assert sum(one["requests"] or 0 for one in result.grouped("tenant").values()) == len(result.requests)


def test_sessions_of_a_less_urgent_tier_wait_for_the_others() -> None:
    sessions = [replace(session(60, think=2.0), tier=tier) for tier in ("priority", "flex")]
    blocks = run(sessions, users=8).context_tokens // BLOCK // 2
    waits = {name: one["ttft_p99_s"] or 0.0 for name, one in run(sessions, 8, blocks).grouped("tier").items()}
    assert waits["flex"] > 4 * waits["priority"]


def test_the_weight_of_a_tier_is_a_factor_of_its_tenants_weight() -> None:
    tiers = ("priority", "default", "flex")
    settings = {"users": 9, "max_num_seqs": 1, "scheduling_policy": "fair", "session_turns": "off"}
    sessions = [replace(session(200, 64, think=0.0), tenant=tier) for tier in tiers]
    weighted = run(sessions, tenant_weights={"priority": 4, "default": 2}, **settings)
    in_tiers = run([replace(one, tier=one.tenant) for one in sessions], **settings)
    assert in_tiers.result.requests.tobytes() == weighted.result.requests.tobytes()
    assert run(sessions, **settings).result.requests.tobytes() != weighted.result.requests.tobytes()


def test_requests_without_a_session_arrive_beside_the_sessions() -> None:
    others = [TraceRequest(2.0 * at, 100, 10, client="bob" if at % 2 else None) for at in range(400)]
    alone, beside = run([session(20, think=5.0)], users=1), run([session(20, think=5.0)], users=1, beside=others)
    assert (len(alone.others), len(beside.others)) == (0, 300), "those of the last six sevenths of 700 s"
    assert len(beside.requests) == pytest.approx(len(alone.requests), abs=1)
    assert set(beside.grouped("tenant")) == {"", "bob"}
    assert beside.figures()["ttft_p50_s"] == pytest.approx(alone.figures()["ttft_p50_s"], abs=0.02)
    again = run([session(20, think=5.0)], users=1, beside=others)
    assert again.result.requests.tobytes() == beside.result.requests.tobytes()


def test_the_command_takes_a_trace_beside_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(0, 2.0 * at, 1.0, 400 + 40 * at, at and 1, at and 100 + 10 * (at - 1)) for at in range(12)]
    (tmp_path / "s.jsonl").write_text(line(*rows) + "\n")
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at},50,5\n" for at in range(60)))
    command = ["simulate", "--sessions", str(tmp_path / "s.jsonl"), "--users", "3", "--duration", "600", "--model", "SmolLM2-135M"]
    trace = ["--trace", str(tmp_path / "t.csv"), "--num-requests", "600"]
    assert main.main([*command, *trace]) == 0
    assert "\nof sessions " in capsys.readouterr().out
    assert main.main([*command, *trace, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["without_session"]["requests"] > 400
    assert main.main([*command, "--num-requests", "5"]) == 2
    assert main.main(["simulate", "--model", "SmolLM2-135M"]) == 2
    assert "--trace FILE or --sessions PATH" in capsys.readouterr().err


def test_no_sessions_are_refused() -> None:
    with pytest.raises(InvalidTrace, match="there is no session"):
        run([], users=1)
    with pytest.raises(InvalidSetting, match="the sessions' numbers do not agree"):
        run([RecordedSession(64, [], [0])], users=1)


def test_the_weights_of_a_recorded_trace_hold_beside_sessions() -> None:
    others = [TraceRequest(0.01 * at, 100, 10, client="ab"[at % 2]) for at in range(4000)]
    weighted = Workload.of(others, {"a": 8})
    settings = {"users": 1, "max_num_seqs": 1, "scheduling_policy": "fair", "session_turns": "off"}
    recorded = run([session(20)], beside=weighted, **settings).result.requests
    assert recorded.tobytes() == run([session(20)], beside=others, tenant_weights={"a": 8}, **settings).result.requests.tobytes()
    assert recorded.tobytes() != run([session(20)], beside=others, **settings).result.requests.tobytes()
    sessions = [replace(session(60, 64, think=0.0), tier=tier, tenant=tier) for tier in ("priority", "flex")]
    settings |= {"users": 8}
    equal = run(sessions, tier_weights={"priority": 1, "flex": 1}, **settings).result.requests
    assert equal.tobytes() == run([replace(one, tier="default") for one in sessions], **settings).result.requests.tobytes()
