"""Results by tenant, session and tier, and how equally tenants were served."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from chairlift import simulate
from chairlift.bench.sessions import RecordedSession, SessionTurn
from chairlift.bench.traces import TraceRequest
from chairlift.cli.main import main
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim import groups, table
from chairlift.sim.models import SharedModel, simulate_models
from chairlift.sim.sessions import simulate_sessions

SIZES = {"model": "SmolLM2-135M", "max_num_seqs": 2, "num_kv_blocks": 200, "max_model_len": 1024}
TRACE = [TraceRequest(index * 1e-4, 40, 20, client="one" if index < 30 else "other") for index in range(60)]


def test_jains_index_is_one_for_equal_amounts_and_one_over_n_if_one_has_all():
    assert groups.jain([3, 3, 3]) == 1
    assert groups.jain([7, 0, 0, 0]) == 0.25
    assert groups.jain([]) is None


def test_the_gap_counts_only_while_both_tenants_wait():
    row = np.dtype([(name, "<i8") for name in ("arrived", "started", "ended")])
    requests = np.array([(0, 4_000_000, 5_000_000), (0, 2_000_000, 3_000_000), (3_000_000, 4_000_000, 5_000_000)], row)
    tenants = np.array(["a", "b", "b"], object)
    service = {"a": np.array([10, 10, 0, 5]), "b": np.array([0, 4, 100])}
    # Both wait in the seconds 0, 1 and 3; the 100 of second 2 do not count.
    assert groups.service_gap(service, 1.0, tenants, requests, {}) == 16
    assert groups.service_gap(service, 1.0, tenants, requests, {"a": 2}) == 6
    assert groups.service_gap(service | {"idle": np.array([90])}, 1.0, tenants, requests, {}) == 16
    assert groups.service_gap({"a": service["a"]}, 1.0, tenants, requests, {}) == 0


def test_taking_turns_makes_the_gap_small():
    gaps = {policy: simulate(TRACE, scheduling_policy=policy, **SIZES).fairness()["service_gap"] for policy in ("fcfs", "vtc")}
    # VTC's bound: twice the larger of a prompt and of a batch's outputs.
    assert gaps["vtc"] <= 2 * max(40, 2 * 2 * 20)
    assert gaps["fcfs"] > 5 * gaps["vtc"]


def test_fairness_counts_weights_in_every_kind_of_simulation():
    weighted = {**SIZES, "tenant_weights": {"one": 3}}
    engine = simulate(TRACE, replicas=2, **weighted).replicas[0]
    model = simulate_models(TRACE, [SharedModel("one", EngineConfig(**weighted))]).results["one"]
    turns = [SessionTurn(1.0, 64, 10, 1, calls_tool=False)] * 3
    sessions = [RecordedSession(64, [turns], [0, 0], tenant=tenant) for tenant in ("one", "other")]
    agents = simulate_sessions(sessions, 2, duration=60.0, block_size=64, **weighted).result
    for result in (engine, model, agents):
        one, other = (result.grouped("tenant")[tenant]["service"] for tenant in ("one", "other"))
        assert result.fairness()["jain_index"] == pytest.approx(groups.jain([one / 3, other]))


def test_groups_sum_to_the_whole_and_are_in_the_document():
    result = simulate(TRACE, **SIZES)
    one, other = (result.grouped("tenant")[name] for name in ("one", "other"))
    assert one["requests"] + other["requests"] == 60
    assert one["ttft_p50_s"] < other["ttft_p50_s"]
    assert one["completion_s"] <= result.span
    assert result.grouped("tier").keys() == {"default"}
    figures = result.figures()
    shared = {name: value for name, value in result.grouped("tier")["default"].items() if name in figures}
    assert {"requests", "ttft_p50_s", "time_per_output_token_p50_s"} <= shared.keys()
    assert shared == {name: figures[name] for name in shared}
    assert result.grouped("session") == {}
    document = result.document()
    assert document["tenants"] == result.grouped("tenant")
    assert document["fairness"]["jain_index"] == pytest.approx(1.0)


def test_refused_says_why(tmp_path, capsys):
    long = [TraceRequest(0.0, 900, 300), TraceRequest(0.1, 40, 5), *[TraceRequest(0.2, 40, 5)] * 9]
    result = simulate(long, max_num_queued_reqs=3, **SIZES)
    assert result.refused_for["too_long"] == 1
    assert result.refused_for["queue_full"] > 1
    assert sum(result.refused_for.values()) == len(result.refused)
    assert any("longer than the context" in sentence for sentence in table.notes(result))
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,900,300\n0.1,40,5\n")
    assert main(["simulate", "--trace", str(trace), "--model", "SmolLM2-135M", "--max-model-len", "1024"]) == 0
    reason = "Refused: 1 requests, longer than the context (max_model_len)."
    assert reason in capsys.readouterr().out
    models = tmp_path / "models.toml"
    models.write_text('[one]\npath = "SmolLM2-135M"\nmax_model_len = 1024\n[two]\npath = "SmolLM2-1.7B"\n')
    assert main(["simulate", "--trace", str(trace), "--models", str(models)]) == 0
    assert f"one: {reason}" in capsys.readouterr().out


def test_a_data_frame_has_a_row_a_request(monkeypatch):
    result = simulate(TRACE, **SIZES)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    frame = result.to_pandas()
    assert list(frame["tenant"]) == list(result.labels("tenant"))
    assert (frame["ended"] == result.requests["ended"]).all()
    frame = SimpleNamespace(from_dict=lambda rows, orient: (rows, orient))
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=frame))
    assert result.to_pandas("tenant") == (result.grouped("tenant"), "index")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidSetting, match="pip install pandas"):
        result.to_pandas()


def test_a_small_rate_is_not_rounded_to_zero():
    quiet = simulate([TraceRequest(at, 40, 5) for at in (0.0, 100.0)], **SIZES)
    shown = dict(line[:2] for line in table.cells({"": quiet}))
    assert float(shown["requests a second"]) == pytest.approx(2 / quiet.span, abs=0.0005)
