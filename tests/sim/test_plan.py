"""Capacity plans of synthetic machines, whose results are known in advance."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import ARENA, workload

from chairlift.bench.traces import TraceRequest
from chairlift.cli import main
from chairlift.cli import plan as plan_command
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim import plan_report
from chairlift.sim.devices import DEVICES, Profile
from chairlift.sim.plan import Plan, Point, Targets, candidates, plan, step_error
from chairlift.sim.run import machine
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload
from chairlift.sim.workload_spec import MAX_REQUESTS, MIN_REQUESTS, WorkloadSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_workloads")]

SIZES = {"num_kv_blocks": 10_001, "block_size": 16, "max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 256}
FIXED = EngineConfig(max_num_seqs=64, max_num_batched_tokens=256, watermark=0.0)
"""No other settings are tried."""
TEN_MS = StepTime.constant(10_000)
PER_TOKEN = StepTime(((0.0, 0.0), (1.0, 1000.0)))


def made_up(step: StepTime, error: float = 0.0, **sizes: int) -> Profile:
    return Profile(name="made up", model=DEFAULT_MODEL, step=step, sizes=SIZES | sizes, errors={"p50": error, "p90": error})


def test_slots_are_the_bottleneck_where_steps_of_any_size_cost_the_same() -> None:
    # A request holds one of 4 slots for 50 steps of 10 ms: 8 a second.
    config = replace(FIXED, max_num_seqs=4)
    found = plan(WorkloadSpec(prompt_tokens=10, output_tokens=50), Targets(ttft=2.0, itl=0.02), device=made_up(TEN_MS), config=config)
    assert 0.85 * 8 < found.capacity.rate < 1.03 * 8
    assert found.bottleneck == "slots"
    assert found.sensitivity["slots"] == pytest.approx(2 * found.capacity.rate, rel=0.15)
    assert found.sensitivity["kv"] == pytest.approx(found.capacity.rate, rel=0.03)
    assert found.sensitivity["itl"] == pytest.approx(found.capacity.rate, rel=0.03)
    assert found.settings == {}
    assert found.default == found.capacity
    assert found.users(30).rate == 30 * found.capacity.rate


def test_the_kv_cache_binds_where_it_holds_few() -> None:
    # A request has 11 blocks for 16 steps of 10 ms, and there are 44: 4 / 0.16 s.
    found = plan(
        WorkloadSpec(prompt_tokens=160, output_tokens=16),
        Targets(ttft=1.0, itl=0.02),
        device=made_up(TEN_MS, num_kv_blocks=45, max_num_batched_tokens=2048),
        config=replace(FIXED, max_num_batched_tokens=2048),
    )
    assert 0.85 * 25 < found.capacity.rate < 1.03 * 25
    assert found.bottleneck == "kv"
    assert found.sensitivity["kv"] == pytest.approx(2 * found.capacity.rate, rel=0.15)
    assert found.sensitivity["slots"] == pytest.approx(found.capacity.rate, rel=0.03)
    assert found.figures["kv_used_max"] == 1


def test_compute_binds_where_tokens_take_all_the_time() -> None:
    # 100 tokens of 1 ms and no answer to speak of: 10 a second.
    found = plan(WorkloadSpec(prompt_tokens=100, output_tokens=1), Targets(ttft=4.0, itl=1.0), device=made_up(PER_TOKEN), config=FIXED)
    assert 0.9 * 10 < found.capacity.rate < 1.03 * 10
    assert found.bottleneck == "compute"
    assert found.sensitivity["compute"] == pytest.approx(2 * found.capacity.rate, rel=0.1)
    assert [point.rate for point in found.points] == sorted(point.rate for point in found.points)
    assert next(point for point in found.points if point.rate == found.capacity.rate).ttft <= 4.0
    assert found.points[-1].ttft > 4.0


def test_the_target_itself_binds_where_more_could_ride_more_slowly() -> None:
    # Steps of 40 ms and 5 ms a rider: within 60 ms for 4, and so for 4 / 60 ms / 20 tokens = 3.3 a second; within 120 ms for 16.
    step = StepTime(((0.0, 40_000.0), (1.0, 40_000.0)), decode_seq=5000.0)
    found = plan(WorkloadSpec(prompt_tokens=1, output_tokens=20), Targets(ttft=5.0, itl=0.0605), device=made_up(step), config=FIXED)
    assert 0.25 * 3.3 < found.capacity.rate < 3.3
    assert found.bottleneck == "itl"
    assert found.sensitivity["itl"] > 1.5 * found.capacity.rate
    assert found.sensitivity["ttft"] == found.capacity.rate


def test_a_target_that_one_alone_misses_is_refused_with_the_number_that_would_do() -> None:
    mix, on = WorkloadSpec(prompt_tokens=10, output_tokens=2), made_up(TEN_MS)
    with pytest.raises(InvalidSetting, match=r"10 ms of TTFT and 10 ms of ITL.*at least --ttft-ms 10"):
        plan(mix, Targets(ttft=0.005, itl=1.0), device=on)
    burst = Workload.of([TraceRequest(0.0, 10, 2)] + [TraceRequest(1.0, 10, 2)] * 99)
    with pytest.raises(InvalidSetting, match=r"isolated requests meet them, but the trace has bursts"):
        plan(WorkloadSpec(trace=burst, timed=True), Targets(ttft=0.015, itl=1.0), device=on, config=replace(FIXED, max_num_seqs=1))
    with pytest.raises(InvalidSetting, match=r"at least --ttft-ms 10 and --itl-ms 11"):
        plan(mix, Targets(ttft=0.001, itl=0.001), device=on)
    # Then 95 of 100 must come while nobody is served, which each is for 20 ms: 5 % / 20 ms.
    found = plan(mix, Targets(ttft=0.010, itl=0.0101), device=on, config=FIXED)
    assert found.capacity.rate == pytest.approx(2.5, rel=0.3)
    assert found.bottleneck == "ttft"


def test_laxer_targets_never_bring_less() -> None:
    step = StepTime(((1.0, 9000.0), (64.0, 70_000.0), (256.0, 330_000.0)), decode_seq=250.0)

    @cache
    def rate(ttft: float, itl: float, percentile: float = 95.0) -> float:
        targets = Targets(ttft=ttft, itl=itl, percentile=percentile)
        return plan(WorkloadSpec(prompt_tokens=60, output_tokens=20), targets, device=made_up(step), config=FIXED).capacity.rate

    firsts = [rate(ttft, 0.5) for ttft in (0.15, 0.4, 1.0)]
    assert firsts == sorted(firsts)
    assert firsts[0] < firsts[-1]
    between = [rate(1.0, itl) for itl in (0.03, 0.08, 0.5)]
    assert between == sorted(between)
    assert between[0] < between[-1]
    assert rate(0.4, 0.5, 99.0) <= rate(0.4, 0.5)


def test_the_range_is_as_wide_as_steps_may_be_off() -> None:
    mix, targets = WorkloadSpec(prompt_tokens=100, output_tokens=1), Targets(ttft=4.0, itl=1.0)
    sure, unsure = (plan(mix, targets, device=made_up(PER_TOKEN, error), config=FIXED) for error in (0.0, 0.2))
    assert sure.capacity.low <= sure.capacity.rate <= sure.capacity.high < 1.1 * sure.capacity.low
    assert unsure.capacity.rate == sure.capacity.rate
    assert unsure.capacity.low == pytest.approx(sure.capacity.rate / 1.2, rel=0.08)
    assert unsure.capacity.high == pytest.approx(sure.capacity.rate * 1.2, rel=0.08)


def test_measurements_that_do_not_suffice_give_no_plan() -> None:
    mix, targets = WorkloadSpec(prompt_tokens=100, output_tokens=1), Targets(ttft=4.0, itl=1.0)
    loaded = made_up(PER_TOKEN, 0.31)
    with pytest.raises(InvalidSetting, match=r"do not suffice for a plan: half of its step times are off by more than 31%\. End other"):
        plan(mix, targets, device=loaded, config=FIXED)
    differing = replace(made_up(PER_TOKEN, 0.1), errors={"p50": 0.1, "p90": 0.2, "spread": 0.6})
    with pytest.raises(InvalidSetting, match="repeated measurements differed by 60%"):
        plan(mix, targets, device=differing, config=FIXED)
    assert step_error(replace(differing, errors={"p50": 0.05, "p90": 0.1, "spread": 0.2})) == 0.2, "the larger of the two"


def test_a_range_that_is_too_wide_is_not_printed_as_a_result(tmp_path: Path) -> None:
    # Steps of 9 ms are within the target of 10 ms, those that are a fifth slower are not.
    on, config = made_up(StepTime.constant(9000), 0.2), replace(FIXED, max_num_seqs=1)
    found = plan(WorkloadSpec(prompt_tokens=10, output_tokens=20), Targets(ttft=1.0, itl=0.01), device=on, config=config)
    assert not found.conclusive
    assert not found.document()["conclusive"]
    summary = plan_report.summary(found, on, DEFAULT_MODEL, "traffic", 30.0, "")
    printed = "\n".join(plan_report.text(found, summary))
    assert "the measurements do not suffice for a plan" in printed
    assert f"between 0 and {found.capacity.high:.3g} requests a second" in printed
    assert "measure again for longer" in printed
    assert "bottleneck" not in printed
    assert "twice" not in printed
    plan_report.page(found, summary).write(str(tmp_path / "plan.html"))
    assert "bottleneck" not in (tmp_path / "plan.html").read_text()
    assert "chairlift calibrate -o FILE" in plan_report.summary(found, DEVICES["h100"], "m", "traffic", 30.0, "")["what to do"]
    sure = replace(found, error=0.0)
    assert "--num-requests" in plan_report.summary(sure, on, "m", "traffic", 30.0, "")["what to do"]


def test_twice_a_resource_is_never_a_loss() -> None:
    # With twice the slots steps are too slow for the target.
    step = StepTime(((0.0, 0.0), (1.0, 1.0)), decode_seq=10_000.0)
    found = plan(
        WorkloadSpec(prompt_tokens=1, output_tokens=20),
        Targets(ttft=4.0, itl=0.045),
        device=made_up(step),
        config=replace(FIXED, max_num_seqs=4, target_itl_ms=1e5),
    )
    assert found.sensitivity["slots"] == found.capacity.rate


def test_smaller_steps_are_chosen_for_the_time_between_tokens() -> None:
    # A step of 256 tokens takes 266 ms; the prompts of 1,000 tokens fill four. Steps of 64 keep 100 ms, those of 128 do not.
    step = StepTime(((0.0, 10_000.0), (1.0, 11_000.0)))
    # A large target turns the default limit on steps off, which would keep 100 ms by itself most of the time.
    mix, targets, config = WorkloadSpec(prompt_tokens=1000, output_tokens=20), Targets(ttft=4.0, itl=0.1), EngineConfig(target_itl_ms=1e5)
    found = plan(mix, targets, config=config, device=made_up(step, 0.05))
    assert found.settings["max_num_batched_tokens"] in (32, 64)
    assert found.capacity.rate > 2 * found.default.rate


def test_the_same_plan_comes_out_again_and_reports_progress() -> None:
    mix, targets, heard = WorkloadSpec(prompt_tokens=100, output_tokens=1), Targets(ttft=4.0, itl=1.0), list[float]()
    found = plan(mix, targets, device=made_up(PER_TOKEN, 0.05), config=replace(FIXED, max_num_seqs=None), on_progress=heard.append)
    again = plan(mix, targets, device=made_up(PER_TOKEN, 0.05), config=replace(FIXED, max_num_seqs=None))
    assert again.document() == found.document()
    assert heard == sorted(heard)
    assert 0 == heard[0] < heard[-1] <= 1


def test_only_what_nobody_set_and_what_was_measured_is_tried() -> None:
    def tried(config: EngineConfig, largest: int | None = None) -> list[dict[str, int]]:
        return candidates(config, machine(None, made_up(TEN_MS), config)[0], largest)

    assert tried(FIXED) == []
    sizes = [change for change in tried(EngineConfig()) if "max_num_batched_tokens" in change]
    assert [change["max_num_batched_tokens"] for change in sizes] == [32, 64, 128, 512, 1024]
    assert [change["max_num_seqs"] for change in sizes] == [32, None, None, None, None], "a step has a token for each slot"
    assert [change for change in tried(EngineConfig()) if len(change) == 1 and "max_num_seqs" in change][-1] == {"max_num_seqs": 256}
    assert max(change.get("max_num_batched_tokens", 0) for change in tried(EngineConfig(), 256)) == 128
    assert all(change["max_num_batched_tokens"] >= 64 for change in tried(EngineConfig(max_num_seqs=64)))
    assert all("max_num_batched_tokens" not in change for change in tried(EngineConfig(max_num_batched_tokens=128)))


def test_spells_are_so_long_and_a_trace_is_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mix = WorkloadSpec(prompt_tokens=10, output_tokens=5, spread=0.5)
    spell = mix.sample(10.0, 120.0, 1)
    assert len(spell) == 1200
    assert spell.column("arrival_us")[-1] == pytest.approx(120e6, rel=0.01)
    assert (spell.column("prompt").min(), spell.column("prompt").max()) == (5, 15)
    assert (mix.sample(10.0, 120.0, 2).requests != spell.requests).any()
    assert len(mix.sample(0.1, 120.0, 0)) == MIN_REQUESTS
    assert len(mix.sample(1e6, 120.0, 0)) == MAX_REQUESTS
    assert mix.max_wait(1e6, 120.0) == MAX_REQUESTS / 1e6 / 20
    trace = workload(ARENA).first(50)
    timed = WorkloadSpec(trace=trace, timed=True)
    assert len(timed.seeds) == 1
    repeated = timed.sample(10.0, 120.0, 0)
    assert len(repeated) == 1200
    assert repeated.column("arrival_us")[-1] == pytest.approx(120e6, rel=1e-3)
    gaps = np.diff(repeated.column("arrival_us"))
    assert np.abs(gaps[50:99] - gaps[:49]).max() <= 1
    assert repeated.column("prompt").tolist() == 24 * trace.column("prompt").tolist()
    assert len(timed.sample(0.1, 120.0, 0)) == MIN_REQUESTS
    assert timed.max_wait(1e6, 120.0) == len(timed.sample(1e6, 120.0, 0)) / 1e6 / 20 == MAX_REQUESTS / 1e6 / 20
    at_random = WorkloadSpec(trace=trace).sample(3.0, 120.0, 0)
    assert len(at_random) == MIN_REQUESTS
    assert (at_random.column("prompt")[:50] == trace.column("prompt")).all()
    assert (np.diff(timed.isolated().column("arrival_us")) >= 1e9).all()


def test_a_short_trace_at_its_own_times_is_repeated_until_a_queue_shows() -> None:
    # 100 tokens of 1 ms and no answer to speak of: 10 a second.
    lines = [TraceRequest(float(number), 100, 1) for number in range(20)]
    timed = WorkloadSpec(trace=Workload.of(lines), timed=True)
    found = plan(timed, Targets(ttft=4.0, itl=1.0), device=made_up(PER_TOKEN), config=FIXED)
    assert found.capacity.rate == pytest.approx(10, rel=0.1)


def test_requests_that_are_too_long_are_left_out() -> None:
    lines = [TraceRequest(0, 100, 10, (1,)), TraceRequest(1, 5000, 10, tuple(range(2, 12))), TraceRequest(2, 600, 10, (1, 40))]
    mix = WorkloadSpec(trace=Workload.of(lines))
    fits = mix.fitting(4096)
    assert mix.excluded(fits) == 1
    assert fits.trace is not None
    assert fits.trace.column("prompt").tolist() == [100, 600]
    assert fits.trace.names.tolist() == [1, 1, 40]
    with pytest.raises(InvalidSetting, match="all requests of the trace exceed"):
        mix.fitting(50)
    with pytest.raises(InvalidSetting, match=r"up to 4200 tokens.*4096"):
        plan(WorkloadSpec(prompt_tokens=4100, output_tokens=100), device=made_up(TEN_MS))


def test_what_is_no_mix_and_no_target_is_refused() -> None:
    for wrong in ({"prompt_tokens": 0}, {"spread": 1.0}, {"burstiness": 0.0}, {"timed": True}, {"trace": Workload.of([])}):
        with pytest.raises(InvalidSetting):
            WorkloadSpec(**wrong)
    with pytest.raises(InvalidSetting, match="--no-self-timed"):
        WorkloadSpec(trace=Workload.of([TraceRequest(0, 1, 1)]), timed=True)
    for wrong in ({"ttft": 0.0}, {"itl": -1.0}, {"percentile": 0.0}):
        with pytest.raises(InvalidSetting):
            Targets(**wrong)
    assert not Targets().met(Point(1.0, math.inf, 0.0))


def test_refusals_are_no_way_to_keep_a_target() -> None:
    config = replace(FIXED, max_num_seqs=1, max_num_queued_reqs=1)
    found = plan(WorkloadSpec(prompt_tokens=10, output_tokens=10), Targets(ttft=1.0, itl=1.0), device=made_up(TEN_MS), config=config)
    assert any(math.isinf(point.ttft) for point in found.points), "of more than 5 in 100 at the highest rates"
    json.dumps(found.document(), allow_nan=False)
    # One is served in 100 ms and one may wait: 95 of 100 get a place (M/D/1/2) up to 3 to 5 a second, where the mean would allow 10.
    assert 2.0 < found.capacity.rate < 6.0


def profile(tmp_path: Path) -> str:
    path = tmp_path / "made_up.json"
    made_up(StepTime(((0.0, 10_000.0), (1.0, 11_000.0))), 0.05).save(path)
    return str(path)


def test_the_command_says_it_in_words_json_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = ["plan", "--modelled-device", profile(tmp_path), "--input-len", "1000", "--output-len", "20", "--ttft-ms", "4000"]
    requested += ["--target-itl-ms", "100000"]  # without the default limit on steps
    found: list[Plan] = []

    def planned(*given: Any, **named: Any) -> Plan:
        found.append(plan(*given, **named))
        return found[-1]

    monkeypatch.setattr(plan_command, "plan", planned)
    page = tmp_path / "plan.html"
    assert main.main([*requested, "--users-every", "60", "--report", str(page)]) == 0
    reported = capsys.readouterr().out
    assert "users" in reported
    assert "every 60 s" in reported
    assert "chairlift serve --max-num-batched-tokens" in reported
    assert "default settings" in reported
    assert "p95 of TTFT within 4 s" in reported
    assert all(words in reported for words in plan_report.DOUBLED.values())
    html = page.read_text()
    assert html.count("<svg") == 2
    assert "target" in html
    with monkeypatch.context() as patch:
        patch.setattr(plan_command, "plan", lambda *_, **__: found[0])
        assert main.main([*requested, "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert raw["users"] == 30 * raw["capacity"]["rate"]
    assert set(raw["sensitivity"]) == set(plan_report.DOUBLED) == set(plan_report.BOTTLENECKS)
    assert raw["settings"]["max_num_batched_tokens"] <= 64
    assert main.main([*requested, "--itl-ms", "1"]) == 2
    assert "at least --itl-ms 11" in capsys.readouterr().err


def test_the_command_plans_for_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requested = [
        "plan",
        "--modelled-device",
        profile(tmp_path),
        "--trace",
        str(ARENA),
        "--num-requests",
        "60",
        "--max-num-seqs",
        "64",
        "--json",
    ]
    requested += ["--max-num-batched-tokens", "64"]
    assert main.main(requested) == 0
    timed = json.loads(capsys.readouterr().out)
    assert "the first 60 requests" in timed["summary"]["traffic"]
    assert "the trace's times" in timed["summary"]["traffic"]
    assert main.main([*requested, "--no-self-timed"]) == 0
    assert "at random times (Poisson)" in json.loads(capsys.readouterr().out)["summary"]["traffic"]


def test_without_a_device_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    requested: list[float] = []

    def calibrate(config: EngineConfig, seconds: float, on_progress: object) -> Profile:
        requested.append(seconds)
        return made_up(TEN_MS)

    monkeypatch.setattr(plan_command, "calibrate", calibrate)
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    assert main.main(["plan", "--input-len", "10", "--output-len", "50", *sizes]) == 0
    reported = capsys.readouterr()
    assert requested == [60]
    assert "measuring this machine" in reported.err
    assert "slots" in reported.out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--swap-space", "1G"], "--swap-space: the block size of a measured machine is unknown"),
        (["--kv-cache-memory-bytes", "1G"], "--kv-cache-memory-bytes: the block size of a measured machine is unknown"),
        (["--num-requests", "9"], "--num-requests has no effect here: it is for the requests of a --trace"),
        (["--no-self-timed"], "--self-timed has no effect here: it is for the requests of a --trace"),
        (["--trace", "x.csv", "--input-len", "9"], "--input-len has no effect here: a --trace has its own lengths"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_measured(
    flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_command, "calibrate", None)
    assert main.main(["plan", *flags]) == 2
    reported = capsys.readouterr()
    [line] = reported.err.splitlines()
    assert says in line
    assert not reported.out


def test_words_are_whole_without_a_gain() -> None:
    found = plan(WorkloadSpec(prompt_tokens=100, output_tokens=1), Targets(ttft=4.0, itl=1.0), device=made_up(PER_TOKEN), config=FIXED)
    assert isinstance(found, Plan)
    reported = plan_report.summary(found, made_up(PER_TOKEN), DEFAULT_MODEL, "traffic", 30.0, "")
    assert "default settings" not in reported
    assert "excluded" not in reported
    assert reported["settings"].startswith("the defaults")
    assert "assumption" not in reported["range"]
    other = plan_report.summary(
        replace(found, settings={"max_num_seqs": 8}, excluded=3), DEVICES["h100"], "./my model", "traffic", 30.0, ""
    )
    assert other["settings"] == "chairlift serve './my model' --max-num-seqs 8"
    assert "assumption" in other["range"], "nobody measured an H100"
    assert "3 requests" in other["excluded"]
    nameless = plan_report.summary(replace(found, settings={"max_num_seqs": 8}), made_up(PER_TOKEN), "", "traffic", 30.0, "")
    assert nameless["title"].startswith("made up: about ")
    assert nameless["settings"] == "chairlift serve MODEL --max-num-seqs 8"
