"""What a look at the engine shows, with the real scheduler and no model."""

import json
import struct

import pytest
from model_sizes import TINY

from chairlift import SamplingParams, Scheduling
from chairlift.config import EngineConfig
from chairlift.engine import frames
from chairlift.engine.engine import Engine
from chairlift.engine.engine_request import EngineRequest
from chairlift.engine.snapshot import EngineSnapshot, PlannedStep, RunningSequence, WaitingSequence
from chairlift.engine.stats import Stats
from chairlift.outputs import Timeline


@pytest.fixture
def engine(tmp_path, monkeypatch):
    clock = iter(range(1_000_000, 10**9, 1000))  # a millisecond from one look at it to the next
    monkeypatch.setattr("chairlift.engine.clock.now", lambda: next(clock))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    settings = {"num_kv_blocks": 20, "block_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    return Engine(EngineConfig(model=str(tmp_path), load_format="none", **settings))


def test_a_look_has_rows_the_queue_the_blocks_and_the_steps_since_the_last_one(engine):
    engine.snapshot()
    for tag, tenant in ((1, "a"), (2, "b"), (3, "c")):
        engine.add(EngineRequest.of(tag, [tag] * 12, SamplingParams(max_tokens=9), Scheduling(tenant=tenant, priority=tag)))
    engine.step()
    engine.step()
    seen = engine.snapshot()
    rows = {row["tag"]: row for row in seen["running"]}
    assert rows.keys() == {1, 2}
    first = rows[1]
    parts = {EngineSnapshot: seen, RunningSequence: first, WaitingSequence: seen["waiting"][0], PlannedStep: seen["steps"][0]}
    assert [part.keys() for part in parts.values()] == [kind.__required_keys__ for kind in parts]
    assert (first["tenant"], first["priority"], first["state"], first["prompt_tokens"], first["blocks"]) == ("a", 1, "decode", 12, 2)
    assert (first["computed_tokens"], first["output_tokens"]) == (13, 2)
    [waiting] = seen["waiting"]
    assert (waiting["tag"], waiting["state"], waiting["tenant"], waiting["output_tokens"]) == (3, "wait_slots", "c", 0)
    assert waiting["waited_us"] > 0
    assert seen["waiting_by_tier"] == {"default": 1}
    cells = struct.unpack("<20I", seen["kv_map"])
    assert (seen["blocks_per_cell"], cells.count(first["slot"] + 3), cells.count(0)) == (1, 2, 20 - 2 - rows[2]["blocks"])
    assert [(step["step"], step["slots"][first["slot"]]) for step in seen["steps"]] == [(0, "p"), (1, "d")]
    assert seen["steps"][0]["admitted"][0] == (first["slot"], 1)
    assert seen["steps"][0]["planned_us"] < seen["steps"][1]["planned_us"] < seen["now_us"]
    # It goes over the wire as it is.
    assert frames.decode(frames.encode(frames.Snapshot(1, seen))[8:])[1].snapshot["kv_map"] == seen["kv_map"]


def test_the_counters_of_a_look_are_of_the_same_time(engine):
    for tag in range(1, 6):
        tier = "flex" if tag > 3 else "default"
        engine.add(EngineRequest.of(tag, [tag] * 12, SamplingParams(max_tokens=9), Scheduling(tier=tier)))
    engine.step()
    seen = frames.decode(frames.encode(frames.Snapshot(1, engine.snapshot()))[8:])[1].snapshot
    stats = Stats(**seen["stats"])
    assert (stats.running, stats.waiting) == (len(seen["running"]), len(seen["waiting"])) == (2, 3)
    assert sum(stats.waiting_by_state.values()) == 3
    assert seen["waiting_by_tier"] == {"default": 1, "flex": 2}
    assert stats.total_blocks - stats.free_blocks == sum(cell > 1 for cell in struct.unpack("<20I", seen["kv_map"]))


def test_a_look_and_an_explanation_agree(engine):
    for tag in (1, 2, 3):
        engine.add(EngineRequest.of(tag, [tag] * 12, SamplingParams(max_tokens=9), Scheduling(tenant=f"t{tag}", priority=tag)))
    for _ in range(3):
        engine.step()
    seen = engine.snapshot()
    for row in (*seen["running"], *seen["waiting"]):
        told = engine.explain(row["tag"])
        for name in ("tenant", "priority", "tier", "prompt_tokens", "output_tokens"):
            assert told[name] == row[name]
        assert told["states"][row["state"]] > 0
        lifetime = sum(told["states"].values())
        if row in seen["waiting"]:
            assert lifetime == told["states"]["wait_slots"] + told["states"].get("wait_step", 0)
            assert abs(lifetime - row["waited_us"]) <= 3000, "the clock goes on by a millisecond for each look at it"
        else:
            assert told["computed_tokens"] == row["computed_tokens"]
            assert abs(lifetime - row["age_us"]) <= 3000


def test_an_account_says_who_ran_meanwhile(engine):
    for tag, tenant in ((1, "a"), (2, "a"), (3, "c")):
        engine.add(EngineRequest.of(tag, [tag] * 12, SamplingParams(max_tokens=9), Scheduling(tenant=tenant)))
    while engine.has_work:
        engine.step()
    [(tenant, microseconds)] = engine.explain(3)["queued_behind"]
    assert tenant == "a"
    assert microseconds > 0
    assert engine.explain(1)["queued_behind"] == []


def test_an_audit_names_who_started_before_a_request_and_why(engine):
    for tag, tier in ((1, "default"), (2, "default"), (3, "flex"), (4, "default"), (5, "priority")):
        engine.add(EngineRequest.of(tag, [tag] * 12, SamplingParams(max_tokens=9), Scheduling(tenant=f"t{tag}", tier=tier)))
    while engine.has_work:
        engine.step()
    flex = Timeline.read(engine.explain(3))
    assert flex.served_before == {"tier": 4}
    assert set(flex.served_first) == {(tag, f"t{tag}", "tier") for tag in (1, 2, 4, 5)}
    assert engine.explain(5)["served_before"] == {}
    assert frames.decode(frames.encode(frames.Explained(1, [engine.explain(3)]))[8:])[1].timelines[0]["served_before"] == {"tier": 4}
