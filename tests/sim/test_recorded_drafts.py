"""A journal as the trace of a simulation: its requests, and its drafts under another load and on another machine."""

import json
from pathlib import Path

import numpy as np
import pytest
from core_requests import add

from chairlift import _core
from chairlift.cli import main
from chairlift.errors import InvalidSetting
from chairlift.runner.buffers import Layout, StepBuffers
from chairlift.sim.replay import Recording
from chairlift.sim.run import simulate
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import DRAFT_COLUMNS

PROMPT, OUTPUT, REQUESTS = 40, 60, 4
LIMITS = {"num_kv_blocks": 201, "block_size": 4, "max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 128}
STEP = StepTime(((0, 9_000), (1, 10_000)))
OFF = {"method": "off"}
AUTO = {"method": "auto", "num_speculative_tokens": 8}


def record(file: Path) -> dict[str, int]:
    """Writes a journal of requests one second apart, whose answers repeat a part of their prompt, and returns the drafter's counters."""
    core = _core.Scheduler(journal=True, draft_tokens=8, **LIMITS)
    buffers = StepBuffers(Layout(LIMITS["max_num_batched_tokens"], LIMITS["max_num_seqs"], LIMITS["max_model_len"] // LIMITS["block_size"]))
    views, now = _core.StepBuffers(**buffers.arrays()), 5_000_000
    for tag in range(REQUESTS):
        now = 5_000_000 + 1_000_000 * tag
        # The last tenth of the answer is new.
        text = [100 * (tag + 1) + at % 20 if at % 60 < 54 else 7000 + 200 * tag + at for at in range(PROMPT + OUTPUT)]
        add(core, tag, np.array(text[:PROMPT], np.int32), OUTPUT, [], now, tenant="ab"[tag % 2])
        while plan := core.plan(views, now):
            at = buffers.positions[buffers.sample_at[: plan.num_samples]]
            sampled = [text[min(position + 1, len(text) - 1)] for position in at.tolist()]
            now += 9_000 + 1_000 * plan.num_tokens
            core.commit(plan, np.array(sampled, np.int32), now)
    file.write_bytes(core.journal())
    return core.stats()


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, dict[str, int]]:
    file = tmp_path / "day.journal"
    return file, record(file)


def test_a_journal_is_a_workload_with_drafts(recorded) -> None:
    file, stats = recorded
    workload = Recording(file).workload()
    assert len(workload) == REQUESTS
    assert (workload.column("prompt") == PROMPT).all()
    assert (workload.column("output") == OUTPUT).all()
    assert workload.column("arrival_us").tolist() == [0, 1_000_000, 2_000_000, 3_000_000]
    assert [workload.tenants[number][0] for number in workload.column("tenant")] == ["a", "b", "a", "b"]
    drafts = dict(zip(DRAFT_COLUMNS, workload.drafts.T, strict=True))
    assert (len(workload.drafts), drafts["tokens"].sum(), drafts["accepted"].sum()) == (
        stats["drafts"],
        stats["draft_tokens"],
        stats["accepted_draft_tokens"],
    )
    assert stats["accepted_draft_tokens"] > 60
    assert (drafts["position"] > PROMPT).all()
    assert (drafts["position"] + drafts["tokens"] < PROMPT + OUTPUT).all()
    # Half as many, and three times as many, keep each request's drafts.
    assert (workload.first(2).drafts == workload.drafts[drafts["request"] < 2]).all()
    thrice = workload.repeated(12).drafts
    assert (thrice[len(workload.drafts) :][: len(workload.drafts), 1:] == workload.drafts[:, 1:]).all()
    assert set(thrice[:, 0].tolist()) <= set(range(12))
    assert len(thrice) == 3 * len(workload.drafts)


def test_recorded_drafts_save_steps_and_less_under_load(recorded) -> None:
    file, _ = recorded
    size = {"max_num_seqs": 64, "num_kv_blocks": 4000, "block_size": 4, "enable_prefix_caching": False}

    def gain(rate: float) -> tuple[float, int, int]:
        off, on = (
            simulate(file, model="SmolLM2-135M", rate_scale=rate, requests=64, step_time=STEP, **size, speculative_config=drafts)
            for drafts in (OFF, AUTO)
        )
        assert off.figures()["draft_tokens"] == 0
        figures = on.figures()
        return float(off.e2e().mean() / on.e2e().mean()), figures["draft_tokens"], figures["accepted_draft_tokens"]

    alone, loaded = gain(1), gain(1e5)
    assert alone[0] > 1.3, "one at a time"
    assert alone[2] > 0.7 * alone[1]
    assert 0.97 < loaded[0] < 1.2, "64 at once"
    assert loaded[1] < alone[1] / 2


def test_a_what_if_run_proposes_the_recorded_drafts(recorded) -> None:
    file, stats = recorded
    figures = Recording(file).what_if({}).figures()
    assert figures["accepted_draft_tokens"] == pytest.approx(stats["accepted_draft_tokens"], rel=0.1)
    assert figures["steps"] == pytest.approx(stats["steps"], rel=0.1)
    assert figures["span_s"] == pytest.approx(Recording(file).replay().result.figures()["span_s"], rel=0.05)


def test_the_command_takes_a_journal(recorded, capsys, tmp_path) -> None:
    file, _ = recorded
    command = ["simulate", "--trace", str(file), "--model", "SmolLM2-135M", "--num-requests", "50", "--json"]
    found = {}
    for name, flags in {"off": ["--speculative-config", '{"method": "off"}'], "on": ["--speculative-config", json.dumps(AUTO)]}.items():
        assert main.main([*command, *flags]) == 0
        found[name] = json.loads(capsys.readouterr().out)["figures"]
    assert found["off"]["draft_tokens"] == 0 < found["on"]["accepted_draft_tokens"]
    assert found["on"]["steps"] == found["off"]["steps"] - found["on"]["accepted_draft_tokens"], "one request at a time"
    (tmp_path / "cut.journal").write_bytes(file.read_bytes()[:20])
    assert main.main(["simulate", "--trace", str(tmp_path / "cut.journal")]) == 2
    assert "cut.journal" in capsys.readouterr().err


def test_a_damaged_journal_is_no_trace(recorded) -> None:
    file, _ = recorded
    damaged = bytearray(file.read_bytes())
    damaged[-9] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(InvalidSetting, match=r"day\.journal cannot be replayed"):
        simulate(file, model="SmolLM2-135M")
