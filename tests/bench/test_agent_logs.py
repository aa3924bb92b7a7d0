"""The logs of coding agents, read as sessions."""

import json
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from chairlift.bench.sessions import RecordedSession, read_sessions
from chairlift.cli.main import main
from chairlift.errors import InvalidTrace


def at(seconds: float) -> str:
    return datetime.fromtimestamp(1_780_000_000 + seconds, UTC).isoformat().replace("+00:00", "Z")


def write(path: Path, *lines: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def user(seconds: float, session: str = "a", **more: object) -> dict[str, object]:
    return {"type": "user", "sessionId": session, "timestamp": at(seconds), "message": {"role": "user", "content": "?"}, **more}


def answer(
    seconds: float, name: str, prompt: int, cached: int = 0, output: int = 5, tool: bool = True, session: str = "a", **more: object
) -> dict[str, object]:
    usage = {"input_tokens": 4, "cache_read_input_tokens": cached, "cache_creation_input_tokens": prompt - cached - 4}
    content = [{"type": "tool_use", "name": "Bash"} if tool else {"type": "text", "text": "Done."}]
    message = {"id": name, "role": "assistant", "content": content, "usage": usage | {"output_tokens": output}}
    return {"type": "assistant", "sessionId": session, "timestamp": at(seconds), "message": message, **more}


def shared_blocks(read: RecordedSession) -> list[int]:
    """How many blocks each prompt of the main thread begins with that the one before it has too."""
    paths = [read.blocks(turn) for turn in read.threads[0]]
    return [sum(one == other for one, other in zip(before, after, strict=False)) for before, after in pairwise(paths)]


def claude_code(folder: Path, session: str = "a") -> None:
    sub = {"isSidechain": True, "agentId": "ab12"}
    write(
        folder / "project" / f"{session}.jsonl",
        {"type": "file-history-snapshot", "messageId": "0"},
        user(0, session),
        # An answer is logged in parts: each has its id, and the last one the counts.
        answer(8, f"{session}1", 6400, 2000, 1, tool=False, session=session),
        answer(10, f"{session}1", 6400, 2000, 90, session=session),
        "{broken",
        {**answer(11, "error", 4, session=session), "message": {"id": "error", "usage": {"input_tokens": 0}, "content": []}},
        user(13, session),
        answer(20, f"{session}2", 6592, 6300, session=session),
        user(60, session),
        answer(70, f"{session}3", 8000, 6500, 30, tool=False, session=session),
        # The conversation was compacted: what is left of it is in the cache.
        user(100, session),
        answer(110, f"{session}4", 2560, 2000, tool=False, session=session),
    )
    write(
        folder / "project" / session / "subagents" / "agent-ab12.jsonl",
        user(21, session, **sub),
        answer(25, f"{session}s1", 640, session=session, **sub),
        user(26, session, **sub),
        answer(50, f"{session}s2", 700, session=session, **sub),
    )


def test_claude_codes_requests_have_their_tokens_times_subagents_and_history(tmp_path):
    claude_code(tmp_path)
    # A session that goes on with the first one may begin with a copy of its lines. Its own two requests are too few.
    write(
        tmp_path / "project" / "b.jsonl",
        answer(10, "a1", 6400, 2000, session="b"),
        user(11, "b"),
        answer(12, "b1", 6420, 2400, session="b"),
        answer(14, "b2", 6500, 6400, session="b"),
    )
    (read,) = read_sessions(tmp_path)
    first, sub = read.threads
    assert [(turn.prompt_tokens, turn.output_tokens, turn.calls_tool) for turn in first] == [
        (6400, 90, True),
        (6592, 5, True),
        (8000, 30, False),
        (2560, 5, False),
    ]
    # The third request waits for the subagent, which ended 10 s before it.
    assert [turn.think for turn in first] == pytest.approx([0, 3, 10, 30])
    assert [list(turn.subagents) for turn in first] == [[], [], [1], []]
    assert [(turn.prompt_tokens, turn.think) for turn in sub] == [(640, 0), (700, pytest.approx(1))]
    assert shared_blocks(read) == [100, 103, 2000 // 64]
    assert read.shared == 2000 // 64, "what the cache had of the first prompt"


def test_early_logs_of_claude_code_have_subagents_in_the_same_file(tmp_path):
    side = {"isSidechain": True}
    write(
        tmp_path / "a.jsonl",
        *(user(0), answer(1, "1", 640), user(2), answer(3, "2", 700)),
        *(user(4, **side, uuid="x", parentUuid=None), answer(6, "s", 128, **side, uuid="y", parentUuid="x")),
        *(user(4, **side, uuid="v", parentUuid=None), answer(5, "t", 192, **side, uuid="w", parentUuid="v")),
        *(user(7), answer(9, "3", 800)),
    )
    (read,) = read_sessions(tmp_path)
    assert [list(turn.subagents) for turn in read.threads[0]] == [[], [], [1, 2]]
    assert sorted(thread[0].prompt_tokens for thread in read.threads[1:]) == [128, 192]


def codex(folder: Path) -> None:
    def item(seconds: float, kind: str, **more: object) -> dict[str, object]:
        return {"timestamp": at(seconds), "type": "response_item", "payload": {"type": kind, **more}}

    def counts(seconds: float, prompt: int, cached: int, output: int, total: int) -> dict[str, object]:
        last = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": output, "reasoning_output_tokens": 2}
        info = {"total_token_usage": {"total_tokens": total}, "last_token_usage": last}
        return {"timestamp": at(seconds), "type": "event_msg", "payload": {"type": "token_count", "info": info}}

    write(
        folder / "2026" / "11" / "rollout-1.jsonl",
        {"timestamp": at(0), "type": "session_meta", "payload": {"id": "1"}},
        {"timestamp": at(0), "type": "event_msg", "payload": {"type": "token_count", "info": None}},
        item(1, "message", role="user"),
        item(4, "function_call", name="shell"),
        counts(5, 9600, 1280, 40, 9640),
        counts(5.5, 9600, 1280, 40, 9640),
        item(9, "function_call_output"),
        item(12, "message", role="assistant"),
        counts(12, 9900, 9472, 60, 19_600),
        item(72, "message", role="user"),
        counts(80, 10_000, 0, 10, 29_610),
    )


def test_codexs_requests_have_their_tokens_times_and_history(tmp_path):
    codex(tmp_path)
    (read,) = read_sessions(tmp_path)
    (thread,) = read.threads
    assert [(turn.prompt_tokens, turn.output_tokens, turn.calls_tool) for turn in thread] == [
        (9600, 40, True),
        (9900, 60, False),
        (10_000, 10, False),
    ]
    assert [turn.think for turn in thread] == pytest.approx([0, 4, 60])
    assert shared_blocks(read) == [150, 154], "a longer prompt goes on with the one before it, whether or not it was cached"
    assert read.shared == 20


def test_each_program_has_sessions_that_begin_in_the_same_way(tmp_path, capsys):
    for session in "abc":
        claude_code(tmp_path / "claude", session)
    codex(tmp_path)
    read = read_sessions(tmp_path)
    assert len({one.group for one in read}) == 2
    assert len(read) == 4
    command = ["simulate", "--sessions", str(tmp_path), "--users", "3", "--duration", "300", "--model", "SmolLM2-135M"]
    assert main([*command, "--max-model-len", "16384"]) == 0
    assert "slowdown over alone, mean" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [-1, "many", 1e3, 10**9, [1]])
def test_lines_that_say_nothing_are_passed_over(tmp_path, tokens):
    claude_code(tmp_path)
    (expected,) = read_sessions(tmp_path)
    broken = answer(12, "odd", 100)
    broken["message"]["usage"]["input_tokens"] = tokens
    lines = [broken, {"payload": 3}, {"payload": {"type": "token_count"}}, {"type": "user"}, [], 7, {**user(12), "timestamp": "noon"}]
    write(tmp_path / "odd.jsonl", *lines)
    assert read_sessions(tmp_path) == [expected]


def test_a_folder_without_logs_is_refused(tmp_path):
    with pytest.raises(InvalidTrace, match=r"no session with three requests.*or a folder with logs of Claude Code or Codex"):
        read_sessions(tmp_path)
