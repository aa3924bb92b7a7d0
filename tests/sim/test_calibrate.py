"""What steps take, learned from steps that were timed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_requests import add

from chairlift import _core
from chairlift.bench.traces import TraceRequest
from chairlift.cli import main
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim import calibrate as calibration
from chairlift.sim.calibrate import agreement, calibrate, from_journal
from chairlift.sim.devices import Profile
from chairlift.sim.fit import fit
from chairlift.sim.run import simulate
from chairlift.sim.steps import Load, StepTime

TRUTH = StepTime(
    ((1.0, 9000.0), (8.0, 9500.0), (64.0, 70_000.0), (256.0, 330_000.0)), decode_seq=250.0, context_token=0.8, prefill_pair=0.05
)


def loads(count: int) -> Load:
    dice = np.random.default_rng(1)
    decodes = np.round(64 ** dice.random(count)).astype(int)
    prompts = np.where(dice.random(count) < 0.5, 0, np.round(190 ** dice.random(count))).astype(int)
    return Load(prompts, decodes, decodes * dice.integers(10, 1500, count) + prompts, prompts * dice.integers(0, 1500, count))


def test_a_fit_finds_what_steps_take_through_noise_and_hiccups() -> None:
    load, dice = loads(2000), np.random.default_rng(2)
    took = TRUTH(load) * dice.uniform(0.95, 1.05, 2000)
    took[::50] *= 2
    found = fit(load, took)
    assert 35 <= found.outliers <= 80
    assert found.error_p50 < 0.05
    assert float(found.step(load).sum()) == pytest.approx(float(took.sum()), rel=0.001), "hiccups are spread over all steps"
    fresh, mean = loads(5000), float((took / TRUTH(load)).mean())
    errors = np.abs(found.step(fresh) / TRUTH(fresh) / mean - 1)
    assert np.percentile(errors, 90) < 0.05
    assert [time for _, time in found.step.curve] == sorted(time for _, time in found.step.curve), "more tokens never take less"


def measured(slowdown: float, seed: int) -> np.ndarray:
    load, dice = loads(300), np.random.default_rng(seed)
    took = TRUTH(load) * dice.uniform(0.95, 1.05, 300) * slowdown
    return np.stack([*load, took, took], axis=1).astype(np.int64)


@pytest.mark.parametrize(
    ("slowdowns", "used"),
    [((1.0, 1.05), [0, 1]), ((1.0, 1.4), []), ((1.4, 1.0, 1.05), [1, 2]), ((1.0, 1.4, 2.0, 1.45), [1, 3]), ((1.0, 1.3, 1.7, 2.2), [])],
)
def test_repeats_that_agree_are_used(slowdowns: tuple[float, ...], used: list[int]) -> None:
    found = agreement([measured(slowdown, seed) for seed, slowdown in enumerate(slowdowns)])
    assert found.used == used
    among = [slowdowns[number] for number in used or range(len(slowdowns))]
    assert found.spread == pytest.approx(max(among) / min(among) - 1, abs=0.02)


@pytest.mark.parametrize(
    ("slowdowns", "repeats", "spread"), [((1.0, 1.0), 2, 0.0), ((1.0, 2.0, 1.0), 3, 0.0), ((1.0, 1.5, 2.5, 4.0), 4, 3.0)]
)
def test_a_measurement_is_repeated_until_two_repeats_agree(
    slowdowns: tuple[float, ...],
    repeats: int,
    spread: float,
    byte_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[int] = []
    parts = [measured(slowdown, 0) for slowdown in slowdowns]

    class Recorded:
        def __init__(self, path: Path) -> None:
            pass

        def steps(self) -> tuple[dict[str, int], np.ndarray]:
            return MEASURED.sizes, np.concatenate(parts[: len(ran)])

    monkeypatch.setattr(calibration, "_run", lambda engine, number, seconds, on_progress: ran.append(number))
    monkeypatch.setattr(calibration, "Recording", Recorded)
    profile = calibrate(EngineConfig(model=str(byte_model), load_format="none"), 10.0)
    assert ran == list(range(repeats))
    assert profile.measured["repeats"] == repeats
    assert profile.errors["spread"] == pytest.approx(spread, abs=0.05)
    assert ("measuring for up to" in caplog.text) == (repeats > 2)


def test_too_few_steps_say_nothing() -> None:
    with pytest.raises(InvalidSetting, match="run for longer"):
        fit(loads(5), np.ones(5))
    with pytest.raises(InvalidSetting, match="run for longer"):
        agreement([measured(1.0, 0), measured(1.0, 0)[:0]])


SHAPES = {"input_ids": 64, "positions": 64, "slot_mapping": 64, "query_starts": 9, "context_lens": 8, "batch_slots": 8, "sample_at": 64}
SHAPES |= {"sample_slots": 64, "copies": 16, "block_tables": (8, 16)}


def journal() -> bytes:
    """Of an engine whose steps take 2 ms and 100 µs a token, and that spends 300 µs between two of them."""
    core = _core.Scheduler(num_kv_blocks=200, block_size=16, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256, journal=True)
    buffers = _core.StepBuffers(**{name: np.zeros(size, np.int32) for name, size in SHAPES.items()})
    now = 1000
    for tag in range(60):
        add(core, tag, np.arange(1 + 7 * tag % 50, dtype=np.int32), 1 + tag % 9, [], now)
        # Every third time until nobody is left: then there is a pause, in which nobody asks for a plan.
        for _ in range(3 if tag % 3 else 100):
            if not core.stats()["running"] + core.stats()["waiting"]:
                now += 1_000_000
                break
            plan = core.plan(buffers, now)
            now += 2000 + 100 * plan.num_tokens
            core.commit(plan, np.ones(plan.num_samples, np.int32), now)
            now += 300
    return core.journal()


def test_a_journal_has_the_steps_and_their_times(tmp_path: Path) -> None:
    recorded = journal()
    steps = np.frombuffer(_core.step_times(recorded), np.int64).reshape(-1, 6)
    tokens = steps[:, 0] + steps[:, 1]
    assert len(steps) == _core.replay(recorded)["report"]["steps"]
    assert (steps[:, 4] == 2000 + 100 * tokens).all()
    busy = steps[:, 5] >= 0
    assert 20 <= (~busy).sum() < len(steps) / 2
    assert (steps[busy, 5] == steps[busy, 4] + 300).all(), "pauses are no part of a step"
    path = tmp_path / "day.journal"
    path.write_bytes(recorded)
    profile = from_journal(path, "some-model")
    assert profile.errors["p90"] < 0.001
    assert profile.step(Load(0, 4, 0, 0)) == pytest.approx(2000 + 400 + 300, rel=0.01)
    assert profile.sizes == {"num_kv_blocks": 200, "block_size": 16, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.mark.slow
def test_an_engine_is_calibrated_and_simulated(byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = str(tmp_path / "here.json")
    assert main.main(["calibrate", "--model", str(byte_model), "--load-format", "none", "--seconds", "1.5", "-o", here]) == 0
    reported = capsys.readouterr().out
    assert "(p90)" in reported
    profile = Profile.load(here)
    assert profile.model == str(byte_model)
    assert profile.sizes["max_num_seqs"] == 64
    result = simulate([TraceRequest(i / 100, 50, 20) for i in range(50)], device=here)
    assert len(result.finished) == 50
    assert result.config["max_num_seqs"] == 64
    assert (
        simulate([TraceRequest(0, 50, 20)], device=here, max_num_seqs=2, max_num_batched_tokens=32).config["max_num_batched_tokens"] == 32
    )
    with pytest.raises(InvalidSetting, match="was measured with"):
        simulate([TraceRequest(0, 50, 20)], device=here, model="Llama-3.1-8B")
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n")
    report = str(tmp_path / "r.html")
    assert main.main(["simulate", "--trace", str(tmp_path / "t.csv"), "--modelled-device", here, "--report", report]) == 0
    assert f"Simulation: {byte_model} on {here}" in Path(report).read_text()
    assert profile.data_types == {"dtype": "auto", "quantization": "auto", "kv_cache_dtype": "auto"}


MEASURED = Profile(
    name="here",
    model="some-model",
    step=StepTime(((1.0, 1000.0), (2.0, 1100.0))),
    sizes={"num_kv_blocks": 200, "block_size": 32, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64},
    data_types={"dtype": "auto", "quantization": "int8", "kv_cache_dtype": "auto"},
)


@pytest.mark.parametrize(
    ("requested", "says"),
    [
        ({"model": DEFAULT_MODEL}, f"--model {DEFAULT_MODEL}: here was measured with some-model; leave it out, or calibrate again with it"),
        ({"block_size": 64}, "--block-size 64: here was measured with 32; leave it out"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: here was measured with auto; leave it out"),
        ({"quantization": "none"}, "--quantization none: here was measured with int8; leave it out"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: here was measured with auto; leave it out"),
        (
            {"kv_cache_memory_bytes": 1 << 30},
            "--kv-cache-memory-bytes: the block size of a measured machine is unknown; use --num-kv-blocks",
        ),
        ({"swap_space": 1 << 30}, "--swap-space: the block size of a measured machine is unknown"),
    ],
)
def test_a_profile_is_asked_for_nothing_that_was_not_measured(requested: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        simulate([TraceRequest(0, 50, 20)], device=MEASURED, **requested)
    assert says in str(caught.value)
    same = {"block_size": 32, "quantization": "int8", "num_kv_blocks": 100, "model": "some-model"}
    assert simulate([TraceRequest(0, 50, 20)], device=MEASURED, **same).config["num_kv_blocks"] == 100


def test_a_journal_does_not_name_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "day.journal").write_bytes(journal())
    day = str(tmp_path / "day.json")
    assert main.main(["calibrate", "--from-journal", str(tmp_path / "day.journal"), "-o", day]) == 0
    assert (Profile.load(day).model, Profile.load(day).data_types) == ("", {})
    assert main.main(["calibrate", "--from-journal", str(tmp_path / "day.journal"), "--seconds", "5", "-o", day]) == 2
    assert "--seconds has no effect here: --from-journal runs nothing" in capsys.readouterr().err
    with pytest.raises(InvalidSetting, match="was measured with an unnamed model"):
        simulate([TraceRequest(0, 50, 20)], device=day, model="Llama-3.1-8B")


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": {**MEASURED.sizes, "block_size": "16"}},
        {"sizes": {**MEASURED.sizes, "max_model_len": 0}},
        {"sizes": {**MEASURED.sizes, "num_kv_blocks": 1.5}},
        {"sizes": {"block_size": 16}},
        {"sizes": []},
        {"step": {**MEASURED.step.document(), "curve": [[1, 2]]}},
        {"step": {**MEASURED.step.document(), "curve": [[1, 2], [2, float("nan")]]}},
        {"step": {**MEASURED.step.document(), "context_token": float("inf")}},
        {"step": {**MEASURED.step.document(), "decode_seq": None}},
        {"kept": []},
        {"kept": None},
        {"model": 5},
        {"name": None},
        {"errors": []},
        {"errors": {"p50": "much"}},
        {"errors": {"p90": -0.1}},
        {"measured": 5},
        {"measured": {"most_tokens": "64"}},
        {"more": 1},
    ],
)
def test_a_file_that_is_no_profile(tmp_path: Path, change: dict[str, Any]) -> None:
    MEASURED.save(tmp_path / "here.json")
    assert Profile.load(tmp_path / "here.json") == MEASURED
    raw = json.loads((tmp_path / "here.json").read_text())
    (tmp_path / "here.json").write_text(json.dumps(raw | change))
    with pytest.raises(InvalidSetting, match=r"here\.json is no profile of a machine .*: 'chairlift calibrate' writes such a file"):
        Profile.load(tmp_path / "here.json")


def test_a_calibration_hears_how_far_it_is(byte_model: Path) -> None:
    heard: list[float] = []
    calibrate(EngineConfig(model=str(byte_model), load_format="none"), 0.5, heard.append)
    assert heard == sorted(heard)
    assert heard[-1] < 1
