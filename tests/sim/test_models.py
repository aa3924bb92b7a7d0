"""Several models in a simulation: each has its scheduler, and they take turns."""

import json

import numpy as np
import pytest

from chairlift.bench.traces import TraceRequest, read
from chairlift.cli import main
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, InvalidTrace
from chairlift.sim.devices import DEVICES, Profile, kv_bytes
from chairlift.sim.models import SharedModel, simulate_models
from chairlift.sim.run import simulate
from chairlift.sim.shapes import shape
from chairlift.sim.steps import StepTime

TOML = """
[big]
path = "Llama-3.1-8B"
weight = 3

[small]
path = "Llama-3.2-1B"
aliases = ["tiny"]
target_itl_ms = 30
"""


def lines(count: int, every: float, models: tuple[str | None, ...]) -> list[TraceRequest]:
    return [TraceRequest(at * every, 100 + at % 50, 20, model=models[at % len(models)]) for at in range(count)]


def models(**settings: object) -> list[SharedModel]:
    big, small = (EngineConfig(model=name, **settings) for name in ("Llama-3.1-8B", "Llama-3.2-1B"))  # type: ignore[arg-type]
    return [SharedModel("big", big), SharedModel("small", small, ("tiny",))]


def test_requests_go_to_their_models_and_figures_add_up() -> None:
    trace = lines(90, 0.01, ("small", None, "tiny"))
    result = simulate_models(trace, models(), device="H100")
    figures = result.figures()
    assert {name: one["requests"] for name, one in figures.items()} == {"big": 30, "small": 60}
    assert {name: one["finished"] for name, one in figures.items()} == {"big": 30, "small": 60}
    big = result.results["big"]
    assert sorted(big.requests["tag"]) == [at for at in range(90) if at % 3 == 1]
    ttft = np.sort(big.ttft())
    assert (figures["big"]["ttft_p50_s"], figures["big"]["ttft_p95_s"]) == (ttft[14], ttft[28])
    assert figures["big"]["tokens_per_s"] == pytest.approx(30 * 20 / result.span)
    shares = [one["time_share"] or 0.0 for one in figures.values()]
    assert 0 < sum(shares) <= 1
    assert shares[0] == pytest.approx(big.stats["step_us"] / 1e6 / result.span)


def test_a_step_of_one_model_delays_the_others() -> None:
    step = {"big": StepTime.constant(50_000), "small": StepTime.constant(10_000)}
    trace = [TraceRequest(0.0, 10, 3, model="big"), TraceRequest(0.001, 10, 2, model="small")]
    result = simulate_models(trace, models(), device="H100", step_times=step)
    big, small = (one.requests[0] for one in result.results.values())
    # The big model's step was on its way. Then the small one goes first, and then they take turns.
    assert (small["first_token"], small["ended"]) == (60_000, 120_000)
    assert (big["first_token"], big["ended"]) == (50_000, 3 * 50_000 + 20_000)


def test_one_model_alone_has_the_results_of_a_single_engine() -> None:
    trace = lines(200, 0.005, (None,))
    alone = simulate(trace, model="Llama-3.1-8B", device="L4")
    both = simulate_models(trace, models()[:1], device="L4").results["big"]
    assert both.requests.tobytes() == alone.requests.tobytes()
    assert (both.steps, both.busy) == (alone.steps, alone.busy)


def test_weights_and_scales_count_and_the_result_is_always_the_same() -> None:
    trace = lines(400, 0.0, ("big", "small"))
    first, second = models(max_num_seqs=8)

    def shares(weight: int) -> bytes:
        heavy = SharedModel("small", second.config, weight=weight)
        result = simulate_models(trace, [first, heavy], device="L4", rate_scale=2.0, requests=300)
        assert sum(one["requests"] or 0 for one in result.figures().values()) == 300
        return b"".join(one.requests.tobytes() for one in result.results.values())

    assert shares(1) == shares(1) != shares(9)


def test_models_share_the_memory_of_a_device() -> None:
    on = DEVICES["h100"]
    result = simulate_models(lines(2, 1.0, ("big", "small")), models(), device="H100")
    blocks = {name: one.config["num_kv_blocks"] for name, one in result.results.items()}
    sizes = {model.name: kv_bytes(shape(model.config.model), "bfloat16") * 16 for model in models()}
    kv = [blocks[name] * sizes[name] for name in blocks]
    left = on.kv_memory(shape("Llama-3.1-8B"), "bfloat16") - 2 * shape("Llama-3.2-1B").num_weights
    assert kv[0] == pytest.approx(kv[1], rel=0.001)
    assert sum(kv) == pytest.approx(left, rel=0.001)
    first, second = models()
    sized = SharedModel("big", EngineConfig(model="Llama-3.1-8B", num_kv_blocks=1000))
    rest = simulate_models(lines(2, 1.0, ("big", "small")), [sized, second], device=on).results["small"]
    assert rest.config["num_kv_blocks"] * sizes["small"] == pytest.approx(left - 1000 * sizes["big"], rel=0.001)
    with pytest.raises(InvalidSetting, match="2 models do not fit in the 24 GB of L4"):
        simulate_models(lines(2, 1.0, (None,)), [first, SharedModel("again", first.config)], device="L4")


def test_each_model_can_have_a_measured_machine() -> None:
    sizes = {"num_kv_blocks": 100, "block_size": 16, "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    profiles = {
        name: Profile(name="here", model=model, step=StepTime.constant(us), sizes=sizes)
        for name, model, us in (("big", "Llama-3.1-8B", 9000), ("small", "", 1000))
    }
    result = simulate_models(lines(2, 1.0, ("big", "small")), models(), device=profiles)
    assert [one.step_time(50) for one in result.results.values()] == [pytest.approx(us, rel=0.004) for us in (0.009, 0.001)]
    with pytest.raises(InvalidSetting, match="no measurement of the model 'small'"):
        simulate_models(lines(2, 1.0, (None,)), models(), device={"big": profiles["big"]})
    with pytest.raises(InvalidSetting, match="was measured with"):
        simulate_models(lines(2, 1.0, (None,)), models(), device={"big": profiles["big"], "small": profiles["big"]})


def test_an_unknown_model_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidTrace, match=r"model 'smal', which is none of the models: did you mean small\?"):
        simulate_models(lines(1, 1.0, ("smal",)), models(), device="H100")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "arrival_s,prompt_tokens,output_tokens,model\n0,10,5,big\n1,10,5,\n2,10,5,tiny\n"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 10, "output_length": 5, "model": "big"}\n'
            '{"timestamp": 1000, "input_length": 10, "output_length": 5}\n'
            '{"timestamp": 2000, "input_length": 10, "output_length": 5, "model": "tiny"}\n',
        ),
    ],
)
def test_traces_name_models(tmp_path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert [line.model for line in read(tmp_path / name)] == ["big", None, "tiny"]


def test_a_model_that_is_no_text_is_refused(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"timestamp": 0, "input_length": 10, "output_length": 5, "model": 7}\n')
    with pytest.raises(InvalidTrace, match="line 1: model is 7, expected text"):
        read(tmp_path / "a.jsonl")


@pytest.fixture
def command(tmp_path) -> list[str]:
    (tmp_path / "models.toml").write_text(TOML)
    rows = "".join(f"{at / 10},100,20,{('big', 'tiny', '')[at % 3]}\n" for at in range(30))
    (tmp_path / "mixed.csv").write_text("arrival_s,prompt_tokens,output_tokens,model\n" + rows)
    return ["simulate", "--trace", str(tmp_path / "mixed.csv"), "--models", str(tmp_path / "models.toml")]


def test_the_command_prints_a_line_for_each_model(command, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main.main([*command, "--modelled-device", "H100", "--report", str(page)]) == 0
    header, big, small, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["model", "requests", "finished", "TTFT", "p50", "p95", "ITL", "p95", "tokens/s", "of", "the", "time"]
    assert (big.split()[:3], small.split()[:3]) == (["big", "20", "20"], ["small", "10", "10"])
    assert "Simulation: 2 models on H100" in page.read_text()
    assert main.main([*command, "--modelled-device", "H100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["figures"].keys() == document["models"].keys() == {"big", "small"}
    assert document["models"]["small"]["config"]["target_itl"] == 30_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "Llama-3.1-8B"], "--model has no effect here"),
        (["--replicas", "2"], "--replicas has no effect here"),
        (["--modelled-device", "big=a.json,small"], "expected NAME=FILE,NAME=FILE, got 'small'"),
    ],
)
def test_flags_that_do_not_fit_are_refused(command, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*command, *flags]) == 2
    assert message in capsys.readouterr().err
