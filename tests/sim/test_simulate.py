"""The simulator itself: what goes in, what comes out, and that it is always the same."""

import hashlib
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from journals import watched
from traces import ARENA, CONV, mooncake, workload

import chairlift
from chairlift.bench.traces import TraceRequest
from chairlift.cli import main
from chairlift.cli.simulate import EXAMPLES
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting, InvalidTrace, ModelNotFound
from chairlift.models.config import ModelConfig
from chairlift.sim import table
from chairlift.sim.devices import DEVICES, Profile, device, kv_bytes
from chairlift.sim.replay import Recording
from chairlift.sim.result import DEADLINE
from chairlift.sim.run import basis, machine, requests_of, run, simulate
from chairlift.sim.shapes import KNOWN, shape
from chairlift.sim.steps import Load, StepTime
from chairlift.sim.workload import COLUMNS, Workload

LIMITS = {"num_kv_blocks": 1001, "block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": 8192}


def digest(result) -> str:
    return hashlib.sha256(result.requests.tobytes() + result.timeline.tobytes()).hexdigest()


def test_one_request_takes_what_its_steps_take() -> None:
    # 1,000 tokens in steps of 512 and 488, then 9 decodes; a token of context costs 1 µs.
    line = TraceRequest(0.5, 1000, 10)
    result = run(Workload.of([line]), LIMITS, StepTime(((0.0, 1000.0), (1.0, 1010.0)), context_token=1.0))
    one = result.requests[0]
    prefill = (1000 + 10 * 512 + 512) + (1000 + 10 * 488 + 1000)
    decodes = [1000 + 10 + 1001 + i for i in range(9)]
    assert (one["arrived"], one["started"]) == (500_000, 500_000)
    assert one["first_token"] - one["arrived"] == prefill
    assert one["ended"] - one["first_token"] == sum(decodes)
    assert one["longest_gap"] == decodes[-1]
    assert (result.steps, result.decisions, len(result.ttft())) == (11, 11, 1)
    assert result.itl(50) == pytest.approx(decodes[4] / 1e6, rel=0.004)
    assert result.ttft()[0] == prefill / 1e6


def test_every_request_ends_and_its_account_adds_up() -> None:
    trace = workload(CONV).first(500)
    result = simulate(trace, model="Llama-3.1-8B", device="L4")
    one = result.requests
    assert sorted(one["tag"]) == list(range(500))
    assert (sum(one[name] for name in result.state_names) == one["ended"] - one["arrived"]).all()
    by_tag = one[np.argsort(one["tag"])]
    assert (by_tag["output_tokens"] == trace.column("output")).all()
    assert (by_tag["arrived"] == trace.column("arrival_us")).all()
    assert result.stats["generated_tokens"] == trace.column("output").sum()


def test_what_each_tenant_was_given_adds_up_and_is_told_over_time(capsys: pytest.CaptureFixture[str]) -> None:
    trace = workload(ARENA).first(400)
    result = simulate(trace, model="Llama-3.1-8B", device="L4", replicas=2, max_num_seqs=8, scheduling_policy="fair")
    reported, (window, service) = result.grouped("tenant"), result.service()
    names = [name for name, _ in trace.tenants]
    for number, name in enumerate(names):
        own = trace.column("tenant") == number
        if own.any():
            given = int(trace.column("prompt")[own].sum() - result.requests["cached_tokens"][result.labels("tenant") == name].sum())
            given += 2 * int(trace.column("output")[own].sum())
            assert (reported[name]["requests"], reported[name]["service"]) == (own.sum(), given)
            assert service[name].sum() == given, "every window together"
    assert sum(one["requests"] or 0 for one in reported.values()) == 400
    # Nobody was given anything before their first arrival, nor after the end.
    for name, values in service.items():
        arrived = trace.column("arrival_us")[trace.column("tenant") == names.index(name)].min() / 1e6
        assert np.flatnonzero(values)[0] >= arrived // window
        assert len(values) <= result.requests["ended"].max() / 1e6 // window + 1
    document = result.document()
    assert document["tenants"].keys() == document["service"]["tenants"].keys() == reported.keys()
    assert main.main(["simulate", "--trace", str(ARENA), "--model", "Llama-3.1-8B", "--modelled-device", "L4", "--num-requests", "50"]) == 0
    assert "tenant" in capsys.readouterr().out
    assert table.group(simulate(workload(CONV).first(20), model="Llama-3.1-8B", device="L4").grouped("tenant"), "tenant") == [], (
        "there is only one"
    )


def test_a_reservation_for_max_tokens_preempts_nobody() -> None:
    trace = workload(CONV).first(300).faster(20)
    limits = {"model": "Llama-3.1-8B", "device": "L4", "num_kv_blocks": 1500, "max_num_seqs": 64, "watermark": 0.0}
    preempted = {
        reservation: simulate(trace, kv_reservation=reservation, **limits).stats["preemptions"]
        for reservation in ("watermark", "max-tokens", "peak")
    }
    assert preempted["max-tokens"] == 0
    assert preempted["watermark"] > 4 * preempted["peak"]


@pytest.mark.slow
def test_the_same_comes_out_to_the_bit_in_another_process_too() -> None:
    first = digest(simulate(CONV, model="Llama-3.1-8B", device="A100", requests=2000, replicas=3, routing="prefix-aware"))
    program = (
        "import test_simulate as t;"
        "print(t.digest(t.simulate(t.CONV, model='Llama-3.1-8B', device='A100', requests=2000, replicas=3, routing='prefix-aware')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    second = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert second.stdout.strip() == first


@pytest.mark.slow
def test_workloads_are_cut_repeated_and_sped_up() -> None:
    trace = mooncake()
    twice = trace.repeated(2 * len(trace))
    assert len(twice) == 2 * len(trace)
    assert (np.diff(twice.column("arrival_us")) >= 0).all()
    assert len(np.unique(twice.names)) == 2 * len(np.unique(trace.names)), "what comes again is not found in the cache"
    assert trace.first(7).column("names").sum() == len(trace.first(7).names)
    assert (trace.faster(2).column("arrival_us") * 2 - trace.column("arrival_us")).max() <= 1
    with pytest.raises(InvalidTrace, match="16 and 512"):
        Workload.of([TraceRequest(0, 16, 1, (1,), hash_block=16), TraceRequest(0, 16, 1, (1,))])


def test_tenants_deadlines_and_predictions_reach_the_scheduler() -> None:
    lines = [TraceRequest(0, 100, 200, client=client) for client in ("a", "b") for _ in range(20)]
    trace = Workload.of(lines, {"a": 3})
    assert trace.tenants == (("a", 3), ("b", 1))
    limits = LIMITS | {"max_num_seqs": 4}
    fair = run(trace, limits | {"scheduling_policy": "fair"}, StepTime.constant(1000)).requests
    middle = np.median(fair["started"])
    early = fair["tag"][fair["started"] < middle]
    assert (early < 20).sum() > 2 * (early >= 20).sum(), "the heavier client goes first"
    due = run(trace.with_(deadline_us=500_000), limits, StepTime.constant(1000))
    assert due.figures()["missed_deadline"] == (due.requests["finish"] == DEADLINE).sum() > 0
    urgent = run(trace.with_(priority=-np.arange(40)), limits | {"scheduling_policy": "priority"}, StepTime.constant(1000)).requests
    assert urgent["tag"][np.argmin(urgent["ended"])] == 39


def test_a_journals_requests_have_their_tiers_and_say_that_sessions_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "day.journal"
    file.write_bytes(watched(requests=60, tiers=("flex", "default"), sessions=3).journal)
    recorded = Recording(file).replay().result.grouped("tier")
    settings = {"num_kv_blocks": 41, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128}
    tiers = simulate(file, model="SmolLM2-135M", device="H100", rate_scale=100.0, **settings).grouped("tier")
    assert {name: one["requests"] for name, one in tiers.items()} == {name: one["requests"] for name, one in recorded.items()}
    assert tiers["default"]["ttft_p50_s"] < tiers["flex"]["ttft_p50_s"]
    weighted = requests_of(file, EngineConfig(tenant_weights={"few": 5}))
    assert sorted(weighted.tenants) == [("few", 10), ("many", 1), ("many", 1)]
    assert main.main(["simulate", "--trace", str(file), "--model", "SmolLM2-135M", "--modelled-device", "H100"]) == 0
    assert "sessions are left out" in capsys.readouterr().err


def test_a_roofline_is_what_bandwidth_and_peak_allow() -> None:
    model, h200 = shape("Llama-3.1-8B"), DEVICES["h200"]
    assert model.num_weights == pytest.approx(8.03e9, rel=0.001)
    assert kv_bytes(model, "bfloat16") == 2 * 32 * 8 * 128 * 2
    step = h200.step_time(model, dtype="bfloat16", kv="bfloat16")
    # All weights but the embedding, of which a step reads a few rows.
    reading = 2 * (8.03e9 - 128256 * 4096) / (0.8 * 4.8e12) * 1e6
    assert step(Load(0, 1, 0, 0)) == pytest.approx(500 + reading, rel=0.001)
    assert step(Load(0, 64, 64 * 4096, 0)) - step(Load(0, 64, 0, 0)) == pytest.approx(64 * 4096 * 131072 / (0.8 * 4.8e12) * 1e6)
    computing = 2 * (8.03e9 - 2 * 128256 * 4096) * 8192 / (0.6 * 989e12) * 1e6
    assert step(Load(8192, 0, 0, 0)) == pytest.approx(500 + computing, rel=0.001)


def test_a_roofline_reads_the_experts_that_tokens_use() -> None:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144, "vocab_size": 151936}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    model = ModelConfig.parse({"architectures": ["Qwen3MoeForCausalLM"], **sizes, **experts})
    h200, expert = DEVICES["h200"], 48 * 3 * 768 * 2048
    step = h200.step_time(model, dtype="bfloat16", kv="bfloat16")
    read = {rows: (step(Load(0, rows, 0, 0)) - rows * step.decode_seq - 500) * 0.8 * 4.8e12 / 2e6 for rows in (1, 16, 256)}
    assert read[1] == pytest.approx(model.num_weights - 151936 * 2048 - 120 * expert, rel=0.001)
    assert read[16] - read[1] == pytest.approx(expert * 128 * (120 / 128 - (120 / 128) ** 16), rel=0.001)
    assert read[256] == pytest.approx(model.num_weights - 151936 * 2048, rel=0.001)
    # A token computes with its own experts alone.
    computing = 2 * (model.num_weights - 2 * 151936 * 2048 - 120 * expert) * 65536 / (0.6 * 989e12) * 1e6
    assert step(Load(65536, 0, 0, 0)) == pytest.approx(500 + computing, rel=0.001)


@pytest.mark.parametrize(("rows", "measured"), [(1, 96), (64, 792)])
def test_the_cpus_roofline_is_near_what_was_measured(rows: int, measured: float) -> None:
    step = DEVICES["cpu"].step_time(shape("SmolLM2-135M"), dtype="int8", kv="float32")
    assert rows / step(Load(0, rows, 0, 0)) * 1e6 == pytest.approx(measured, rel=0.1)


def test_sizes_follow_the_machines_memory() -> None:
    settings, _ = machine("Llama-3.1-8B", "H100", EngineConfig())
    free = 0.92 * 80e9 - 2 * 8.03e9 - 2 * 2**30
    assert settings["num_kv_blocks"] == pytest.approx(free / (16 * 131072), rel=0.001)
    with pytest.raises(InvalidSetting, match="no memory for a KV cache"):
        machine("Llama-3.1-70B", "H100", EngineConfig())
    for small in ({"block_size": 10**9}, {"kv_cache_memory_bytes": 10}, {"num_kv_blocks": 1}):
        with pytest.raises(InvalidSetting, match=r"the KV cache needs two blocks, but [01] of "):
            machine("Llama-3.1-8B", "H100", EngineConfig(**small))
    with pytest.raises(InvalidSetting, match="num_kv_blocks must be a whole number from 2 to 4294967295, got 4294967296"):
        simulate([TraceRequest(0, 1, 1)], model="Llama-3.1-8B", device="H100", num_kv_blocks=2**32)
    halved = machine("Llama-3.1-8B", "H100", EngineConfig(kv_cache_dtype="fp8"))[0]
    assert halved["num_kv_blocks"] == pytest.approx(2 * settings["num_kv_blocks"], rel=0.001)
    for refused in ({"quantization": "int8"}, {"kv_cache_dtype": "int8"}):
        with pytest.raises(InvalidSetting, match="int8"):
            machine("Llama-3.1-8B", "H100", EngineConfig(**refused))


def test_the_cpu_keeps_weights_as_asked_and_says_how() -> None:
    one = Load(0, 1, 0, 0)
    usual, none = (machine("Llama-3.2-1B", "cpu", EngineConfig(quantization=how))[1](one) for how in ("auto", "none"))
    assert none > 3 * usual, "four bytes a weight for one"
    said = basis("Llama-3.2-1B", device("cpu"), EngineConfig(quantization="none", kv_cache_dtype="int8"))
    assert said.endswith("weights float32, KV cache int8.")
    assert basis(None, device("cpu"), EngineConfig(model="Llama-3.2-1B")).endswith("weights int8, KV cache float32.")
    assert basis("Llama-3.1-8B", device("H100"), EngineConfig()).endswith("weights bfloat16, KV cache bfloat16.")


def test_mistakes_are_told(tmp_path: Path) -> None:
    trace = workload(CONV).first(3)
    with pytest.raises(InvalidSetting, match=r"H200.*calibrate"):
        device("H300")
    with pytest.raises(ModelNotFound, match=r"Llama-3\.1-8B"):
        shape(str(tmp_path / "nothing"))
    for wrong in ({"rate_scale": 0}, {"rate_scale": float("nan")}, {"rate_scale": float("inf")}, {"requests": 0}, {"replicas": 0}):
        with pytest.raises(InvalidSetting, match=r"at least|above 0"):
            simulate(trace, model="Llama-3.1-8B", device="H100", **wrong)
    with pytest.raises(InvalidSetting, match="round-robin, least-loaded, prefix-aware"):
        simulate(trace, model="Llama-3.1-8B", device="H100", routing="random")
    with pytest.raises(TypeError, match=r"simulate\(\) got an unexpected keyword argument 'max_num_seq': did you mean max_num_seqs\?"):
        simulate(trace, model="Llama-3.1-8B", device="H100", max_num_seq=4)
    with pytest.raises(InvalidSetting, match="rising tokens"):
        run(trace, LIMITS, StepTime(((1.0, 1.0), (1.0, 2.0))))
    with pytest.raises(InvalidSetting, match="num_kv_blocks"):
        run(trace, LIMITS | {"num_kv_blocks": 1}, StepTime.constant(1))
    with pytest.raises(InvalidSetting, match="negative"):
        run(trace.with_(prompt=-1), LIMITS, StepTime.constant(1))
    with pytest.raises(InvalidSetting, match="a thousand years"):
        simulate([TraceRequest(0, 1, 1), TraceRequest(9e8, 1, 1)], model="Llama-3.1-8B", device="H100", requests=1000)
    (tmp_path / "odd.json").write_text("[]")
    with pytest.raises(InvalidSetting, match="no profile"):
        Profile.load(tmp_path / "odd.json")


def test_a_directory_goes_before_a_known_model_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-3.1-8B").mkdir()
    assert shape("Llama-3.1-8B").num_layers == shape("meta-llama/Llama-3.1-8B-Instruct").num_layers == 32  # a directory with nothing in it
    (tmp_path / "Llama-3.1-8B" / "config.json").write_text(json.dumps(KNOWN["Llama-3.2-1B"]))
    for name in ("Llama-3.1-8B", "./Llama-3.1-8B", str(tmp_path / "Llama-3.1-8B")):
        assert shape(name).num_layers == 16
    with pytest.raises(ModelNotFound, match="Mistral-7B"):
        shape("./Mistral-7B")


def test_simulate_is_a_name_of_the_package() -> None:
    assert chairlift.simulate is simulate
    assert len(COLUMNS) == workload(CONV).requests.shape[1]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_command_prints_a_table_json_and_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    requested = ["simulate", "--trace", str(CONV), "--model", "Llama-3.1-8B", "--modelled-device", "H100", "--num-requests", "300"]
    assert main.main([*requested, "--policy", "shortest", "--max-num-seqs", "8", "--report", str(tmp_path / "page.html")]) == 0
    table = capsys.readouterr().out
    assert "simulated with 300 of its requests" in (tmp_path / "page.html").read_text()
    assert "TTFT, p50" in table
    assert "times real time" in table
    page = _Page()
    page.feed((tmp_path / "page.html").read_text())
    assert not page.outside, "the page needs no network"
    for reported in (" ".join(table.split()), (tmp_path / "page.html").read_text()):
        assert "80% of its bandwidth, 60% of its peak, 0.5 ms overhead) are assumptions, not measurements" in reported
    assert main.main([*requested, "--json", "--batching", "static", "--static-batch-size", "4", "--max-num-seqs", "4"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["figures"]["finished"] == 300
    assert (reported["config"]["batching"], reported["config"]["static_batch_size"]) == ("static", 4)
    assert max(reported["timeline"]["batch"]) <= 4
    assert main.main(["simulate", "--trace", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_help_names_every_machine_and_model() -> None:
    for name in [*(one.name for one in DEVICES.values()), *KNOWN]:
        assert name in EXAMPLES
