"""The binding: what crosses between Python and the Rust scheduler, and what is refused."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from core_requests import add
from journals import watched

from chairlift import SamplingParams, Scheduling, _core
from chairlift.engine.engine_request import EngineRequest, ResumedChoice
from chairlift.outputs import Timeline

MAX_SEQS, MAX_TOKENS, BLOCK, MAX_LEN = 4, 32, 4, 64


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    shapes = {
        "input_ids": MAX_TOKENS,
        "positions": MAX_TOKENS,
        "slot_mapping": MAX_TOKENS,
        "query_starts": MAX_SEQS + 1,
        "context_lens": MAX_SEQS,
        "batch_slots": MAX_SEQS,
        "sample_at": MAX_TOKENS,
        "sample_slots": MAX_TOKENS,
        "copies": 2 * MAX_SEQS,
        "block_tables": (MAX_SEQS, MAX_LEN // BLOCK),
    }
    return {name: np.zeros(shape, np.int32) for name, shape in shapes.items()} | changes


def scheduler(num_blocks: int = 33, max_tokens: int = MAX_TOKENS) -> _core.Scheduler:
    return _core.Scheduler(
        num_kv_blocks=num_blocks, block_size=BLOCK, max_num_batched_tokens=max_tokens, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN
    )


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_changes_of_block_tables_are_listed_for_whoever_keeps_them_elsewhere() -> None:
    core, step = scheduler(), arrays(table_writes=np.zeros(2 * MAX_SEQS * MAX_LEN // BLOCK, np.int32))
    buffers, elsewhere = _core.StepBuffers(**step), np.zeros_like(step["block_tables"])
    add(core, 70, ids(5, 6, 7, 8, 9, 3, 4), 4, [], 0)
    written = []
    for now in range(3):
        plan = core.plan(buffers, now)
        assert plan is not None
        written.append(plan.num_table_writes)
        for place, block in step["table_writes"][: 2 * plan.num_table_writes].reshape(-1, 2):
            elsewhere.flat[place] = block
        assert (elsewhere == step["block_tables"]).all()
        core.commit(plan, ids(1), now)
    assert written == [2, 0, 1]
    with pytest.raises(ValueError, match="table_writes has 8 entries, needs 128"):
        core.plan(_core.StepBuffers(**arrays(table_writes=np.zeros(8, np.int32))), 9)


def test_a_model_with_states_gets_the_slot_of_each_sequence() -> None:
    core = _core.Scheduler(
        num_kv_blocks=33, block_size=BLOCK, max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, state_slots=6
    )
    lengths = {"state_slots": MAX_SEQS, "state_copies": 2 * MAX_SEQS, "state_saves": 3 * 6}
    step = arrays(**{name: np.full(length, -1, np.int32) for name, length in lengths.items()})
    add(core, 70, ids(5, 6, 7, 8, 9), 2, [1], 0)
    add(core, 71, ids(3), 4, [1], 0)
    plan = core.plan(_core.StepBuffers(**step), 0)
    assert plan is not None
    slots = step["state_slots"].tolist()
    assert len(set(slots[:2])) == 2
    assert set(slots[:2]) <= set(range(6))
    assert slots[2:] == [-1, -1]
    with pytest.raises(ValueError, match="state_slots has 0 entries, needs 4"):
        core.plan(_core.StepBuffers(**arrays()), 9)
    with pytest.raises(ValueError, match="state_saves has 2 entries, needs 18"):
        core.plan(_core.StepBuffers(**step | {"state_saves": np.zeros(2, np.int32)}), 9)
    with pytest.raises(ValueError, match=re.escape("state_slots (3) must be at least max_num_seqs (4)")):
        _core.Scheduler(max_num_seqs=4, state_slots=3)


@pytest.mark.parametrize(("given", "saved"), [(None, [8, 16]), (12, [12, 16]), (5, [4]), (20, [16])])
def test_the_state_is_saved_at_the_end_of_the_users_turn(given: int | None, saved: list[int]) -> None:
    sizes = {"num_kv_blocks": 33, "block_size": BLOCK, "max_num_batched_tokens": MAX_TOKENS, "max_num_seqs": MAX_SEQS}
    core = _core.Scheduler(**sizes, max_model_len=MAX_LEN, state_slots=9, end_tokens=[7, 2])
    step = arrays(state_slots=np.zeros(4, np.int32), state_copies=np.zeros(8, np.int32), state_saves=np.zeros(27, np.int32))
    # Without a given end, the turn ends with the last end token, after 10 tokens. After 5 tokens more than the beginning of an answer
    # follows, so the state at the prompt's end would be that before its last 12 tokens, which is in the same block.
    prompt = ids(1, 2, 3, 4, 5, 6, 7, 8, 9, 2, *range(11, 20))
    core.add(EngineRequest.of(1, prompt, SamplingParams(max_tokens=4), Scheduling(user_turn_end=given)), 0)
    plan = core.plan(_core.StepBuffers(**step), 0)
    assert plan is not None
    saves = step["state_saves"][: 3 * plan.num_state_saves].reshape(-1, 3)
    assert saves[:, 1].tolist() == saved
    assert not set(saves[:, 2].tolist()) & {int(step["state_slots"][0])}


def test_a_step_crosses_in_flat_arrays() -> None:
    core, step = scheduler(), arrays()
    buffers = _core.StepBuffers(**step)
    first = add(core, 70, ids(5, 6, 7, 8, 9), 2, [1], 1000)
    add(core, 71, ids(3), 4, [1], 1000)
    plan = core.plan(buffers, 2000)
    assert plan is not None
    assert (plan.num_tokens, plan.num_seqs, plan.num_samples, plan.num_copies) == (6, 2, 2, 0)
    assert [(row, tag, *admission) for row, _, tag, *admission in plan.admitted] == [(0, 70, 0, 0, 1000), (1, 71, 0, 0, 1000)]
    assert plan.admitted[0][1] == first
    assert step["input_ids"][:6].tolist() == [5, 6, 7, 8, 9, 3]
    assert step["positions"][:6].tolist() == [0, 1, 2, 3, 4, 0]
    assert step["query_starts"][:3].tolist() == [0, 5, 6]
    assert step["context_lens"][:2].tolist() == [5, 1]
    assert step["sample_at"][:2].tolist() == [4, 5]
    table = step["block_tables"][0]
    assert step["slot_mapping"][:5].tolist() == [table[0] * BLOCK + i for i in range(4)] + [table[1] * BLOCK]

    outputs = core.commit(plan, ids(11, 1), 3000)
    assert np.frombuffer(outputs.tags, "<u8").tolist() == [70, 71]
    assert np.frombuffer(outputs.tokens, "<i4").tolist() == [11, 1]
    assert list(outputs.finishes) == [0, 1]
    assert outputs.ended == [
        {
            "tag": 71,
            "finish": "stop",
            "arrived": 1000,
            "submitted": 1000,
            "started": 2000,
            "first_token": 3000,
            "ended": 3000,
            "prompt_tokens": 1,
            "cached_tokens": 0,
            "own_cached_tokens": 0,
            "lost_hit_tokens": 0,
            "output_tokens": 1,
            "computed_tokens": 1,
            "recomputed_tokens": 0,
            "compute_ns": 166_667,
            "energy_uj": None,
            "draft_tokens": 0,
            "accepted_draft_tokens": 0,
            "preemptions": 0,
            "swaps": 0,
            "block_us": 1000,
            "tenant": "",
            "priority": 0,
            "tier": "default",
            "limit": None,
            "preempted_by": [],
            "preempted_for": {},
            "evicted_for": {},
            "states": {"wait_step": 1000, "prefill_shared": 1000},
        }
    ]
    assert core.explain(71) == {**outputs.ended[0], "queued_behind": [], "served_before": {}, "served_first": []}
    assert core.tokens(first) == (ids(5, 6, 7, 8, 9, 11).tobytes(), 5)

    plan = core.plan(buffers, 4000)
    assert plan is not None
    assert list(core.commit(plan, ids(12), 5000).finishes) == [2]
    assert core.plan(buffers, 6000) is None
    stats = core.stats()
    assert [stats[name] for name in ("running", "waiting", "free_blocks", "total_blocks")] == [0, 0, 32, 32]
    assert [stats[name] for name in ("steps", "prompt_tokens", "generated_tokens")] == [2, 6, 3]
    core.check()


def test_a_prompts_tokens_count_as_computed_step_by_step() -> None:
    core, buffers = scheduler(max_tokens=4), _core.StepBuffers(**arrays())
    add(core, 1, ids(*range(10)), 2, [], 0)
    counts = []
    for now in range(4):
        plan = core.plan(buffers, now)
        assert plan is not None
        core.commit(plan, ids(*[7] * (now >= 2)), now + 1)
        counts.append([core.stats()[name] for name in ("prompt_tokens", "computed_prompt_tokens", "computed_tokens")])
    assert counts == [[10, 4, 4], [10, 8, 8], [10, 10, 10], [10, 10, 11]]


def test_a_token_that_is_none_ends_its_request_alone() -> None:
    core, buffers = scheduler(), _core.StepBuffers(**arrays())
    add(core, 1, ids(5), 3, [], 0)
    add(core, 2, ids(6), 3, [], 0)
    plan = core.plan(buffers, 0)
    assert plan is not None
    assert list(core.commit(plan, ids(-1, 9), 0).finishes) == [3, 0]
    assert core.stats()["running"] == 1


@pytest.mark.parametrize(
    ("prompt", "new", "error", "words"),
    [
        ([], 1, _core.EmptyPrompt, "no tokens"),
        ([1], 0, _core.NoNewTokens, "at least one"),
        ([1] * 60, 5, _core.TooLong, "60 prompt tokens and 5 new ones exceed the 64"),
        ([1] * 20, 20, _core.NeverFits, "needs 10 KV blocks, the cache has 4: at most 17 tokens"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(prompt: list[int], new: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        add(scheduler(num_blocks=5), 0, ids(*prompt), new, [], 0)


def test_a_field_that_only_the_core_uses_is_defined_in_scheduling_and_in_the_core() -> None:
    for_the_engine = {"cache_salt", "cache_group", "limit_group"}
    made_by_the_engine = {"tag", "max_new_tokens", "weight", "preparation"}
    # Deadlines are milliseconds after the arrival for callers, and times in the core.
    python = {field.name.removesuffix("_ms") for field in fields(Scheduling)} - for_the_engine
    assert set(_core.request_fields()) - made_by_the_engine == python


def test_a_request_has_its_fields_in_the_core() -> None:
    core = _core.Scheduler(
        **{
            "num_kv_blocks": 33,
            "block_size": BLOCK,
            "max_num_batched_tokens": MAX_TOKENS,
            "max_num_seqs": MAX_SEQS,
            "max_model_len": MAX_LEN,
        },
        **{"journal": True, "tenant_weights": {"a": 3}, "tier_weights": {"flex": 5}},
    )
    scheduling = Scheduling(
        priority=-2, tier="flex", tenant="a", deadline_ms=1.5, ttft_deadline_ms=0.25, predicted_tokens=4, session="s", user_turn_end=2
    )
    request = EngineRequest.of(7, ids(1, 2, 3), SamplingParams(max_tokens=None), scheduling, submitted=5000, spent={"receive": 1000})
    core.add(request, 9000)
    journal = core.journal()
    unpacker = msgpack.Unpacker()
    unpacker.feed(journal[journal.index(b"\xa3tag") - 1 :])
    assert unpacker.unpack() == {
        "tag": 7,
        "max_new_tokens": MAX_LEN - 3,
        "priority": -2,
        "tier": "flex",
        "tenant": "a",
        "weight": 15,
        "deadline": 5500,
        "ttft_deadline": 4250,
        "predicted_tokens": 4,
        "session": "s",
        "parent_session": None,
        "user_turn_end": 2,
        "preparation": None,
    }
    assert core.explain(7)["arrived"] == 4000  # type: ignore[index]


def test_a_request_adds_a_sequence_for_each_answer() -> None:
    core = _core.Scheduler(
        num_kv_blocks=33, block_size=BLOCK, max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, end_tokens=[9]
    )
    three = core.add(EngineRequest.of(10, ids(1, 2), SamplingParams(n=3, max_tokens=4, stop_token_ids=(8,))), 100)
    assert [answer for answer, _ in three] == [0, 1, 2]
    lost = ResumedChoice(1, ids(5, 6).tobytes(), 1, 0, 10, 20, 30), ResumedChoice(2, b"", 0, 0, 10, 20, None)
    resumed = core.add(EngineRequest.of(20, ids(1, 2), SamplingParams(n=3, ignore_eos=True), resumed=lost), 100)
    assert [(answer, core.tokens(seq)[0], core.tokens(seq)[1]) for answer, seq in resumed] == [
        (1, ids(1, 2, 5, 6).tobytes(), 2),
        (2, ids(1, 2).tobytes(), 2),
    ]
    assert [core.explain(tag)["tag"] for tag in (10, 11, 12, 21, 22)] == [10, 11, 12, 21, 22]  # type: ignore[index]
    assert core.explain(20) is None
    assert core.explain(21)["first_token"] == 130  # type: ignore[index]
    buffers = _core.StepBuffers(**arrays())
    plan = core.plan(buffers, 200)
    assert plan is not None
    by_tag = {tag: 9 for _, _, tag, *_ in plan.admitted} | {10: 8}
    outputs = core.commit(plan, ids(*[by_tag[tag] for _, _, tag, *_ in plan.admitted]), 300)
    finishes = dict(zip(np.frombuffer(outputs.tags, np.uint64).tolist(), outputs.finishes, strict=True))
    assert finishes == {10: 1, 21: 0, 22: 0}, "a stop token ends the first, and no end token those that ignore it"


def test_a_request_that_is_refused_leaves_nothing() -> None:
    core = scheduler()
    lost = ResumedChoice(0, b"", 0, 0, 0, 0, None), ResumedChoice(1, ids(*range(4)).tobytes(), 0, 0, 0, 0, 0)
    with pytest.raises(_core.NoNewTokens):
        core.add(EngineRequest.of(1, ids(1), SamplingParams(n=2, max_tokens=4), resumed=lost), 0)
    assert core.stats()["waiting"] == 0
    for request in (
        EngineRequest(1, b"123", SamplingParams()),
        EngineRequest.of(1, [-1], SamplingParams()),
        EngineRequest.of(1, [1], SamplingParams(), spent={"no such state": 5}),
    ):
        with pytest.raises(ValueError, match=r"token|state"):
            core.add(request, 0)
    core.check()


def test_handles_are_never_reused() -> None:
    core = scheduler()
    first = add(core, 1, ids(5), 1, [], 0)
    assert core.abort(first, 0)
    second = add(core, 1, ids(5), 1, [], 0)
    assert first != second
    assert not core.abort(first, 0)
    assert core.stats()["waiting"] == 1
    with pytest.raises(KeyError):
        core.tokens(first)


@pytest.mark.parametrize(
    "changes",
    [
        {"slot_mapping": np.zeros(MAX_TOKENS, np.int64)},
        {"slot_mapping": np.zeros(2 * MAX_TOKENS, np.int32)[::2]},
        {"slot_mapping": np.zeros(0, np.int32)},
        {"block_tables": np.zeros(MAX_SEQS, np.int32)},
    ],
)
def test_unfit_buffers_are_refused(changes: dict[str, np.ndarray]) -> None:
    with pytest.raises((ValueError, BufferError)):
        _core.StepBuffers(**arrays(**changes))


def test_short_buffers_and_spent_plans_are_refused() -> None:
    core = scheduler()
    add(core, 1, ids(5), 3, [], 0)
    with pytest.raises(ValueError, match="batch_slots has 2 entries, needs 4"):
        core.plan(_core.StepBuffers(**arrays(batch_slots=np.zeros(2, np.int32))), 0)
    plan = core.plan(_core.StepBuffers(**arrays()), 0)
    assert plan is not None
    with pytest.raises(ValueError, match="sampled has 0 tokens, the plan samples 1"):
        core.commit(plan, ids(), 0)
    core.commit(plan, ids(4), 0)
    with pytest.raises(RuntimeError, match="committed before"):
        core.commit(plan, ids(4), 0)


@pytest.mark.slow
def test_stub_matches_the_module(tmp_path: Path) -> None:
    # In a package that has nothing else: mypy would check all of ours, and torch, before it comes to the stub.
    package = tmp_path / "chairlift"
    package.mkdir()
    (package / "__init__.py").touch()
    for file in Path(_core.__file__), Path(_core.__file__).with_name("_core.pyi"):
        (package / file.name).symlink_to(file)
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-numpy.*]\nfollow_imports = skip\n")  # its types are many, and none of them is compared
    command = [sys.executable, "-m", "mypy.stubtest", "chairlift._core", "--ignore-disjoint-bases", "--mypy-config-file", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "MYPYPATH": f"{tmp_path}:{Path(_core.__file__).parents[1]}"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def stub_fields() -> dict[str, tuple[set[str], set[str]]]:
    """The fields of each dict in the stub, and those of them that may be absent."""
    found: dict[str, tuple[set[str], set[str]]] = {"TypedDict": (set(), set())}
    for node in ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef) and node.bases and (base := found.get(ast.unparse(node.bases[0]))) is not None:
            own = {ast.unparse(item.target): ast.unparse(item.annotation) for item in node.body if isinstance(item, ast.AnnAssign)}
            optional = {name for name, kind in own.items() if kind.startswith("NotRequired")}
            found[node.name] = base[0] | own.keys(), base[1] | optional
    return found


def test_dicts_have_the_fields_that_the_stub_names() -> None:
    core, (known, optional) = scheduler(), stub_fields()["Timeline"]
    add(core, 70, ids(5, 6, 7), 1, [1], 0, deadline_ms=1)
    explained = core.explain(70)
    assert explained is not None
    (missed,) = core.expire(2000)
    assert known <= explained.keys()
    assert known - optional == missed.keys() & known
    same = {field.name for field in fields(Timeline)}
    assert explained.keys() - known <= same
    assert same - known <= explained.keys() | {"block_seconds", "compute_seconds", "energy_joules", "expected_wait_ms", "max_wait_ms"}
    journal = watched(requests=4).journal
    shadow = _core.Shadow(journal, [{}])
    shadow.advance(100)
    taken = shadow.take()
    dicts = {"Usage": core.usage(), "Replay": _core.replay(journal), "WhatIf": _core.what_if(journal, {}), "ShadowReport": taken}
    dicts |= {"Report": _core.replay(journal)["report"], "Ended": taken["recorded"], "Workload": _core.workload(journal)}
    assert {name: found.keys() for name, found in dicts.items()} == {name: stub_fields()[name][0] for name in dicts}


def accounts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures in a report's columns, by the names of a timeline."""
    names = ["tag", "finish", "arrived", "started", "first_token", "ended", "prompt_tokens", "cached_tokens", "output_tokens"]
    names += ["computed_tokens", "recomputed_tokens", "preemptions", "swaps", "block_us"]
    found = []
    for line in np.frombuffer(report["ended"], np.int64).reshape(-1, 17 + len(report["states"])).tolist():
        states = {name: time for name, time in zip(report["states"], line[17:], strict=True) if time}
        finish = ("stop", "length", "error", "deadline", "abort")[line[1] - 1]
        found.append(dict(zip(names, line, strict=False)) | {"finish": finish, "states": states})
    return found


def test_what_was_recorded_decides_the_same_again_and_can_be_lived_otherwise() -> None:
    core = _core.Scheduler(
        num_kv_blocks=33,
        block_size=BLOCK,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        scheduling_policy="priority",
        journal=True,
    )
    buffers, now = _core.StepBuffers(**arrays()), 0
    for tag in range(12):
        add(core, tag, ids(*range(10 + tag % 3)), 6, [1], tag * 10, priority=tag % 2, tenant="one")
    while (plan := core.plan(buffers, now)) is not None:
        now += 1000
        core.commit(plan, np.full(MAX_TOKENS, 7, np.int32), now)
    journal = core.journal()
    assert core.journal() == b""
    again = _core.replay(journal)
    assert (again["differs_at"], again["truncated"]) == (None, False)
    assert again["report"]["steps"] == core.stats()["steps"]
    assert len(accounts(again["report"])) == 12
    for one in accounts(again["report"]):
        timeline = core.explain(one["tag"])
        assert timeline is not None
        assert one == {name: timeline[name] for name in one}
    assert (again["config"]["scheduling_policy"], again["config"]["max_num_queued_reqs"]) == ("priority", None)
    slower = _core.what_if(journal, {"max_num_seqs": 1, "scheduling_policy": "fcfs"})
    assert slower["config"] == again["config"] | {"max_num_seqs": 1, "scheduling_policy": "fcfs"}
    assert slower["report"]["steps"] > again["report"]["steps"]
    assert [one["tag"] for one in accounts(slower["report"])] == list(range(12))
    with pytest.raises(ValueError, match='no setting "seqs": there are num_kv_blocks, '):
        _core.what_if(journal, {"seqs": 1})
    with pytest.raises(ValueError, match="damaged"):
        _core.replay(journal[:200] + b"\xff" * 100 + journal[300:])
    assert _core.replay(journal[:-3])["truncated"]
    with pytest.raises(ValueError, match="no journal"):
        _core.replay(b"something else")
    with pytest.raises(ValueError, match="a journal of version 1, and only version 4 can be read here"):
        _core.replay(b"chairlift-journal-1\n" + journal[20:])


def test_a_journal_with_a_request_that_the_scheduler_refuses_is_damaged() -> None:
    core = _core.Scheduler(
        num_kv_blocks=100, block_size=BLOCK, max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, journal=True
    )
    with pytest.raises(_core.NoNewTokens):
        add(core, 5, ids(1), 0, [], 0)
    empty = core.journal()
    add(core, 5, ids(1), 1, [], 0)
    assert _core.replay(empty)["calls"] == 0
    # Whoever writes such a record all the same has no right checksum, and is told where.
    record = core.journal()
    with pytest.raises(ValueError, match=f"damaged at byte {len(empty)}"):
        _core.what_if(empty + record[:-6] + bytes([record[-6] ^ 1]) + record[-5:], {})


def test_settings_are_refused_by_the_table_that_lists_them() -> None:
    table = {setting.pop("name"): setting for setting in _core.settings()}
    limits: dict[str, Any] = {"num_kv_blocks": 33, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 64}
    assert table.keys() >= limits.keys()
    assert table["max_num_queued_reqs"] == {
        "doc": "Requests that may wait.",
        "default": None,
        "min": 0,
        "max": 2**32 - 2,
        "optional": True,
    }
    assert table["kv_reservation"]["names"] == ["watermark", "max-tokens", "peak"]
    _core.Scheduler(**limits | {name: setting["default"] for name, setting in table.items() if name not in limits})
    with pytest.raises(ValueError, match=r"^max_num_seqs must be a whole number from 1 to 4294967295, got 0$"):
        _core.Scheduler(**limits | {"max_num_seqs": 0})
    with pytest.raises(
        ValueError, match=r"^scheduling_policy must be one of fcfs, priority, fair, deadline, shortest, prefix, vtc, got best$"
    ):
        _core.Scheduler(**limits, scheduling_policy="best")
    with pytest.raises(ValueError, match='no setting "color": there are num_kv_blocks, '):
        _core.Scheduler(**limits | {"color": 1})


def test_a_full_queue_says_when_to_come_back() -> None:
    core = _core.Scheduler(
        num_kv_blocks=33,
        block_size=BLOCK,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        max_num_queued_reqs=1,
    )
    add(core, 1, ids(5), 3, [], 0)
    with pytest.raises(_core.QueueFull, match="at most 1 may") as caught:
        add(core, 2, ids(5), 3, [], 0)
    assert caught.value.args[1] == 0


def test_a_policy_that_there_is_not_is_named() -> None:
    limits = {
        "num_kv_blocks": 33,
        "block_size": BLOCK,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_num_seqs": MAX_SEQS,
        "max_model_len": MAX_LEN,
    }
    with pytest.raises(ValueError, match="fcfs, priority, fair, deadline, shortest, prefix"):
        _core.Scheduler(**limits, scheduling_policy="random")
    with pytest.raises(ValueError, match="batching must be one of continuous, static, dynamic, got bus"):
        _core.Scheduler(**limits, batching="bus")


def test_the_documentation_has_every_policy_as_the_help_says_it() -> None:
    page = (Path(__file__).parent.parent / "docs" / "scheduling" / "policies.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|[^|]*\| [^|]+ \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted(_core.POLICIES)
    for name, _ in _core.POLICIES:
        assert f"\n## {name}\n" in page or name == "vtc"  # which is explained under `fair`


def test_no_code_in_python_runs_while_the_scheduler_is_locked() -> None:
    # Another thread that then asks the scheduler would wait with the GIL, and both for ever.
    code = """if True:
        import dataclasses
        from core_requests import add
        from test_core import ids, scheduler
        core, asdict = scheduler(), dataclasses.asdict
        dataclasses.asdict = lambda item: asdict(item) if core.stats()["waiting"] == 0 else None
        add(core, 7, ids(1, 2), 4, [], 0)
        assert core.stats()["waiting"] == 1
    """
    path = ":".join([str(Path(__file__).parent), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, env={**os.environ, "PYTHONPATH": path})


def test_a_kv_cache_gives_what_it_was_given_and_refuses_other_blocks_and_sizes() -> None:
    cache = _core.KvCache(parts=[(2, 1, 8, None), (1, 3, 4, None)], blocks=3, block_size=4, dtype="float32", host_blocks=1)
    empty = cache.read(2)
    held = np.arange(len(empty), dtype=np.uint8).tobytes()
    cache.write(1, held)
    cache.swap([(1, 0)], [(0, 2)])
    assert [cache.read(block) for block in range(3)] == [empty, held, held]
    refused = [
        lambda: cache.read(3),
        lambda: cache.copy([(1, 3)]),
        lambda: cache.copy([(3, 1)]),
        lambda: cache.swap([(1, 1)], []),
        lambda: cache.swap([], [(0, 3)]),
        lambda: cache.discard([1, 3]),
        lambda: cache.write(3, held),
        lambda: cache.write(0, held[1:]),
        lambda: cache.write(0, held + b"x"),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"there is no (host )?block|a block has \d+ bytes"):
            call()
    assert [cache.read(block) for block in range(3)] == [empty, held, held]
    with pytest.raises(MemoryError):
        _core.KvCache(parts=[(1 << 20, 1 << 20, 1 << 30, None)], blocks=3, block_size=4, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", "int8"])
def test_weights_without_inputs_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="have no inputs"):
        _core.Linear([[("float32", 4, np.zeros(0, np.uint8), 0)]], 0, dtype, threads=1)


def test_the_longest_context_has_the_most_splits() -> None:
    work = np.frombuffer(_core.decode_work(ids(0, 1), ids(2**31 - 1)), np.int32).reshape(-1, 4)
    assert work[0, 0] == _core.max_splits(2**31 - 1) == 64
    assert work[64, 2] == 2**31 - 1
