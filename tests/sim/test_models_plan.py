"""Plans of several models on synthetic machines, whose results are known in advance."""

import json
from pathlib import Path

import numpy as np
import pytest

from chairlift.bench.traces import TraceRequest
from chairlift.cli import main
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim.devices import Profile
from chairlift.sim.models import SharedModel
from chairlift.sim.models_plan import ModelsPlan, plan_models
from chairlift.sim.plan import Targets, plan
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload
from chairlift.sim.workload_spec import WorkloadSpec

pytestmark = pytest.mark.slow

SIZES = {"num_kv_blocks": 10_001, "block_size": 16, "max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 256}
CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=256, watermark=0.0)


def profile(step_us: int, error: float = 0.0, **sizes: int) -> Profile:
    return Profile(name="made up", model="", step=StepTime.constant(step_us), sizes=SIZES | sizes, errors={"p50": error, "p90": error})


def spec(*models: str | None, prompt: int = 10, output: int = 50) -> WorkloadSpec:
    lines = [TraceRequest(0.0, prompt, output, model=models[at % len(models)]) for at in range(400)]
    return WorkloadSpec(trace=Workload.of(lines))


def shared(*names: str) -> list[SharedModel]:
    return [SharedModel(name, CONFIG) for name in names]


def planned(*models: str, error: float = 0.0, itl: float = 0.05) -> ModelsPlan:
    names = sorted(set(models))
    on = {name: profile(10_000, error) for name in names}
    return plan_models(spec(*models), shared(*names), Targets(ttft=2.0, itl=itl), device=on)


@pytest.mark.usefixtures("short_workloads")
def test_one_model_has_the_capacity_of_a_plan_for_one() -> None:
    one = planned("a", itl=0.02)
    alone = plan(spec("a"), Targets(ttft=2.0, itl=0.02), device=profile(10_000), config=CONFIG)
    assert one.capacity.rate == pytest.approx(alone.capacity.rate, rel=0.03)
    assert one.limit == ("a", "ttft")


def test_models_share_the_steps_of_one_machine() -> None:
    # A step of 10 ms serves 4 requests of one model, each for 50 steps: 8 a second for both together.
    both = planned("a", "b")
    assert 0.8 * 8 < both.capacity.rate < 1.03 * 8
    assert [point.rate for point in both.points.values()] == [both.capacity.rate / 2] * 2
    assert sum(one["time_share"] or 0.0 for one in both.figures.values()) <= 1.0
    assert all(both.targets.met(point) for point in both.points.values())


def test_the_model_with_the_most_requests_is_the_limit() -> None:
    skewed = planned("a", "a", "a", "b", "a")
    assert skewed.limit == ("a", "ttft")
    assert skewed.points["b"].ttft < skewed.points["a"].ttft


@pytest.mark.usefixtures("short_workloads")
def test_the_error_of_the_step_times_gives_the_range_and_the_plan_is_always_the_same() -> None:
    first, again = planned("a", "b", error=0.2), planned("a", "b", error=0.2)
    assert first == again
    assert first.error == 0.2
    assert first.capacity.low < 0.95 * first.capacity.rate < 1.05 * first.capacity.rate < first.capacity.high


def test_requests_that_exceed_their_own_models_context_are_left_out() -> None:
    lines = [TraceRequest(0.0, 200, 50, model=name) for name in ("a", "b") * 200]
    on = {"a": profile(10_000), "b": profile(10_000, max_model_len=128)}
    found = plan_models(WorkloadSpec(trace=Workload.of(lines)), shared("a", "b"), Targets(), device=on)
    assert (found.excluded, list(found.points)) == (200, ["a"])


def test_targets_that_isolated_requests_miss_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="isolated requests of a is 10 ms of TTFT and 11 ms of ITL"):
        planned("a", "b", itl=0.005)
    with pytest.raises(InvalidSetting, match="several models need a --trace"):
        plan_models(WorkloadSpec(), shared("a"), device="cpu")


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "models.toml").write_text('[big]\npath = "Llama-3.1-8B"\n[small]\npath = "Llama-3.2-1B"\n')
    times = np.cumsum(np.random.default_rng(0).exponential(0.1, 400))
    rows = "".join(f"{time:.3f},100,20,{('big', 'small')[at % 2]}\n" for at, time in enumerate(times))
    (tmp_path / "mixed.csv").write_text("arrival_s,prompt_tokens,output_tokens,model\n" + rows)
    return ["plan", "--trace", str(tmp_path / "mixed.csv"), "--models", str(tmp_path / "models.toml")]


def test_the_command_prints_the_rate_and_a_line_for_each_model(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*command, "--modelled-device", "L4"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0].startswith("2 models on L4: about ")
    assert [line.split()[0] for line in text[-3:]] == ["model", "big", "small"]
    assert main.main([*command, "--modelled-device", "L4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert f"about {document['capacity']['rate']:.3g} " in text[0]
    assert document["figures"].keys() == document["points"].keys() == {"big", "small"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--models needs a --modelled-device"),
        (["--modelled-device", "L4", "--model", "Llama-3.1-8B"], "--model has no effect here"),
        (["--modelled-device", "L4", "--report", "a.html"], "--report has no effect here"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    command: list[str], flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main([*command, *flags]) == 2
    assert message in capsys.readouterr().err
