"""Comparisons of batching modes, with figures that can be checked by hand, and their plot."""

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from chairlift.bench.traces import TraceRequest
from chairlift.cli import main
from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.sim import compare, compare_plot
from chairlift.sim.devices import Profile
from chairlift.sim.run import machine, run
from chairlift.sim.steps import StepTime
from chairlift.sim.workload import Workload

ROOT = Path(__file__).parent.parent.parent
IMAGE = ROOT / "docs" / "images" / "compare.svg"
WAYS = ("static", "dynamic", "continuous")
SVG = "{http://www.w3.org/2000/svg}"


def results(outputs, arrivals=None, *, slots=2, ways=WAYS, timeout=2.0, **settings):
    """Requests with a prompt of one token and so many tokens of output, in steps of a millisecond."""
    lines = [TraceRequest(at / 1000, 1, output) for at, output in zip(arrivals or [0] * len(outputs), outputs, strict=True)]
    found = {}
    for variant in compare.variants(EngineConfig(max_num_seqs=slots, **settings), ways, ["fcfs"], None, timeout):
        scheduler, _ = machine(None, "cpu", variant.config)
        found[variant.name] = compare.from_simulation(variant, run(Workload.of(lines), scheduler, StepTime.constant(1000)))
    return found


def drawn(found):
    return ElementTree.fromstring(compare_plot.plot(list(found.values()), "A & B", "<title>"))


def marked(root, kind, tag="rect"):
    return [element for element in root.iter(f"{SVG}{tag}") if element.get("class") == kind]


def test_a_static_batch_takes_as_long_as_its_longest_request() -> None:
    # 4 + 2 + 3 + 1 tokens on two slots: batches of 4 and 3 steps, or 10 / 2 steps without a free slot.
    found = results([4, 2, 3, 1])
    static, lift = found["static"].figures(), found["continuous"].figures()
    assert (static["duration_s"], lift["duration_s"]) == (0.007, 0.005)
    assert (static["tokens_per_s"], lift["tokens_per_s"]) == (pytest.approx(10 / 0.007), pytest.approx(10 / 0.005))
    assert (static["slot_utilisation"], lift["slot_utilisation"]) == (pytest.approx(10 / 14), pytest.approx(1.0))
    # First tokens come a step after admission: at 0, 0, 4, 4, or at 0, 0, 2, 4.
    assert (static["wait_mean_s"], lift["wait_mean_s"]) == (pytest.approx(0.002), pytest.approx(0.0015))
    assert [static[f"ttft_p{percent}_s"] for percent in (50, 95)] == [0.001, 0.005]
    assert [lift[f"ttft_p{percent}_s"] for percent in (50, 95)] == [0.001, 0.005]
    assert found["dynamic"].figures() == static, "with all there from the start no bus has to wait"


def test_slots_are_idle_until_the_batch_ends() -> None:
    found = results([4, 2, 3, 1])
    assert found["static"].slot_free_at().tolist() == [4000, 4000, 7000, 7000]
    assert found["static"].assign_slots() == [0, 1, 0, 1]
    assert results([2, 4, 1, 3])["static"].slot_free_at().tolist() == [4000, 4000, 7000, 7000], "whoever is the last of them"
    assert found["continuous"].slot_free_at().tolist() == [4000, 2000, 5000, 5000]
    assert found["continuous"].assign_slots() == [0, 1, 1, 0]


def test_a_dynamic_batch_waits_to_fill_until_its_timeout() -> None:
    # The first has waited its 2 ms at 2, and leaves alone; who came at 3 has waited long enough when that bus is back, at 6.
    dynamic = results([4, 2], [0, 3], ways=["dynamic"])["dynamic"]
    assert dynamic.spans["started"].tolist() == [2000, 6000]
    assert dynamic.duration == 0.008
    assert results([4, 2], [0, 1], ways=["dynamic"])["dynamic"].spans["started"].tolist() == [1000, 1000]


def test_the_lift_is_never_behind_the_bus() -> None:
    workload = Workload.of(compare.synthetic_requests(60, 64, 96, 10.0))
    for slots in (2, 8, 16):
        config = EngineConfig(max_num_seqs=slots)
        rates = [
            compare.simulate_variant(workload, one, None, "cpu").figures() for one in compare.variants(config, WAYS, ["fcfs"], None, 500.0)
        ]
        assert rates[2]["tokens_per_s"] > max(rates[0]["tokens_per_s"], rates[1]["tokens_per_s"])
        assert rates[2]["slot_utilisation"] > max(rates[0]["slot_utilisation"], rates[1]["slot_utilisation"])
        assert all(one["served"] == 60 for one in rates)


def test_made_up_lengths_have_the_means_asked_for() -> None:
    lines = compare.synthetic_requests(4000, 64, 96, 5.0)
    for lengths, mean in (([line.prompt_tokens for line in lines], 64), ([line.output_tokens for line in lines], 96)):
        assert np.mean(lengths) == pytest.approx(mean, rel=0.05)
        assert max(lengths) / min(lengths) == pytest.approx(compare.LENGTH_RATIO, rel=0.1)
    assert [line.arrival for line in lines[:3]] == [0.0, 0.2, 0.4]


def test_variants_are_named_by_what_sets_them_apart() -> None:
    def names(batchings, policies):
        return [one.name for one in compare.variants(EngineConfig(max_num_seqs=4), batchings, policies, 2, 100.0)]

    assert names(["static", "continuous"], ["fcfs"]) == ["static", "continuous"]
    assert names(["continuous"], ["fcfs", "shortest"]) == ["fcfs", "shortest"]
    assert names(["static", "continuous"], ["fcfs", "fair"]) == ["static, fcfs", "static, fair", "continuous, fcfs", "continuous, fair"]
    with pytest.raises(InvalidSetting, match="given twice"):
        names(["static", "static"], ["fcfs"])
    with pytest.raises(InvalidSetting, match="--static-batch-size"):
        compare.variants(EngineConfig(max_num_seqs=1), ["static"], ["fcfs"], 2, 100.0)


def test_the_plot_has_a_bar_for_each_request() -> None:
    found = results([4, 2, 3, 1, 6, 2, 2], slots=3)
    root = drawn(found)
    spans = marked(root, "request")
    assert len(spans) == 3 * 7
    assert len(marked(root, "prompt")) == 3 * 7 + 1, "and one in the legend"
    rows: dict[str, list[tuple[float, float]]] = {}
    for span in [*spans, *(kept for kept in marked(root, "idle") if kept.get("x") and kept.get("height") == spans[0].get("height"))]:
        begin = float(span.get("x", ""))
        rows.setdefault(span.get("y", ""), []).append((begin, begin + float(span.get("width", ""))))
    assert len(rows) == 3 * 3
    for row in rows.values():
        assert all(end <= begin + 0.1 for (_, end), (begin, _) in pairwise(sorted(row))), "no two in one slot"
        assert all(compare_plot.LEFT <= begin < end <= compare_plot.WIDTH - compare_plot.RIGHT + 0.1 for begin, end in row)
    reported = [text.text for text in root.iter(f"{SVG}text")]
    assert "A & B" in reported
    assert "<title>" in reported
    assert "0.0 s" in reported


@pytest.mark.parametrize("why", ["many requests", "many slots"])
def test_where_bars_would_be_too_many_the_plot_has_areas(why: str) -> None:
    found = results([1 + at % 5 for at in range(201)]) if why == "many requests" else results([4, 2, 3], slots=65)
    root = drawn(found)
    assert not marked(root, "request")
    assert len(marked(root, "running", "path")) == 3


def test_a_preempted_request_has_no_bar() -> None:
    [variant] = compare.variants(EngineConfig(max_num_seqs=2), ["continuous"], ["fcfs"], None, 1.0)
    spans = [(tag, 0, tag * 1000, tag * 1000 + 500, 9000, 4, 3000) for tag in range(3)]
    lost = compare.variant_result(variant, 2, spans, 1)
    assert lost.assign_slots() is None
    assert lost.figures()["slot_utilisation"] == pytest.approx((9 + 8 + 7 - 9) / 18), "only while it had one"
    assert lost.figures()["unserved"] == 1
    assert len(marked(drawn({"a": lost}), "running", "path")) == 1


def test_an_area_is_as_large_as_what_it_shows() -> None:
    static = results([4, 2, 3, 1])["static"]
    across = compare_plot.TimeScale(static.duration)
    waits = across.mean_open(static.spans["arrived"], static.spans["started"])
    assert waits.mean() * static.duration == pytest.approx(2 * 0.004)
    assert (waits[:10].tolist(), waits[-10:].tolist()) == ([2.0] * 10, [0.0] * 10)


def test_the_command_draws_the_readmes_picture_and_prints_the_table_of_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["compare", "-o", str(tmp_path / "compare.svg")]) == 0
    table = capsys.readouterr().out.split("\n\n")[1]
    again = "has changed: chairlift compare -o docs/images/compare.svg, and put its table into docs/capacity/compare.md"
    assert (tmp_path / "compare.svg").read_text() == IMAGE.read_text(), again
    assert table in (ROOT / "docs" / "capacity" / "compare.md").read_text(), again


def test_the_command_runs_a_trace_and_makes_a_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at / 9},40,{9 + at}\n" for at in range(30)))
    requested = [
        "compare",
        "--trace",
        str(tmp_path / "trace.csv"),
        "--model",
        "Llama-3.1-8B",
        "--modelled-device",
        "H100",
        "--max-num-seqs",
        "4",
    ]
    page = tmp_path / "page.html"
    assert (
        main.main([*requested, "--batching", "continuous,static", "--policy", "fcfs,shortest", "--rate-scale", "9", "--report", str(page)])
        == 0
    )
    table = capsys.readouterr().out
    assert "continuous, shortest" in table
    assert "Data types: weights bfloat16" in " ".join(table.split())
    assert "The same 30 requests on the same 4 batch slots." in table
    assert page.read_text().count('class="request"') == 4 * 30
    assert main.main([*requested, "--json", "--num-requests", "10"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert [one["batching"] for one in reported["variants"]] == list(WAYS)
    assert all(one["figures"]["served"] == 10 for one in reported["variants"])


def test_the_model_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CHAIRLIFT_MODEL", "Llama-3.2-1B")
    assert main.main(["compare", "--batching", "continuous"]) == 0
    named = capsys.readouterr().out
    assert "Llama-3.2-1B on two cores of a Xeon, simulated." in named
    monkeypatch.delenv("CHAIRLIFT_MODEL")
    assert main.main(["compare", "--batching", "continuous", "--model", "Llama-3.2-1B"]) == 0
    assert capsys.readouterr().out == named


def test_a_profile_without_a_model_names_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_kv_blocks": 1000, "block_size": 16, "max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 256}
    Profile(name="here", model="", step=StepTime.constant(1000), sizes=sizes).save(tmp_path / "here.json")
    assert main.main(["compare", "--modelled-device", str(tmp_path / "here.json"), "--batching", "continuous"]) == 0
    assert "over 5.2 s. here, simulated." in capsys.readouterr().out


def test_really_run_the_same_requests_are_served(byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requested = ["compare", "--run", "--model", str(byte_model), "--load-format", "none", "--num-requests", "12", "--output-len", "8"]
    drawing = tmp_path / "run.svg"
    assert main.main([*requested, "--request-rate", "1000", "--batch-timeout-ms", "5", "--json", "-o", str(drawing)]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["figures"]["served"], one["figures"]["unserved"]) for one in reported["variants"]] == [
        (way, 12, 0) for way in WAYS
    ]
    assert len(marked(ElementTree.parse(drawing).getroot(), "request")) == 3 * 12


def test_requests_that_fit_nowhere_are_counted(byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,40,9\n0,4000,9\n0.01,10,4\n")
    requested = ["compare", "--run", "--model", str(byte_model), "--load-format", "none", "--trace", str(tmp_path / "trace.csv")]
    assert main.main([*requested, "--batching", "continuous"]) == 0
    [header, line] = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert header.endswith("not served")
    assert line.split()[-1] == "1"


def test_it_says_why_requests_were_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,900,300\n0.1,40,5\n")
    page, flags = tmp_path / "page.html", ["--trace", str(trace), "--model", "SmolLM2-135M", "--max-model-len", "1024"]
    reason = "continuous: Refused: 1 requests, longer than the context (max_model_len)."
    assert main.main(["compare", *flags, "--batching", "continuous", "--report", str(page)]) == 0
    assert reason in capsys.readouterr().out
    assert reason in page.read_text()
    assert main.main(["compare", *flags, "--batching", "continuous", "--json"]) == 0
    [variant] = json.loads(capsys.readouterr().out)["variants"]
    assert variant["refused_for"] == {"too_long": 1}


def status(arguments: list[str]) -> object:
    try:
        return main.main(arguments)
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batching", "bus"], "expected some of continuous, static, dynamic, got 'bus'"),
        (["--policy", "fcfs,first"], "got 'first'"),
        (["-o", "picture.pdf"], "expected a name that ends in .svg"),
        (["--num-requests", "0"], "expected a whole number"),
        (["--batch-timeout-ms", "0"], "expected a number"),
        (["--run", "--modelled-device", "H100"], "--run uses this machine"),
        (["--rate-scale", "2"], "--rate-scale has no effect here: it is for a --trace"),
        (["--trace", "x.csv", "--output-len", "9"], "--output-len has no effect here: it is for synthetic requests, without --trace"),
        (["--static-batch-size", "9"], "--static-batch-size (9) must be at most --max-num-seqs (8)"),
        (["--batching", "static,static"], "given twice"),
        (["--threads", "2"], "--threads has no effect here: it is for --run"),
        (["--batching", "continuous", "--static-batch-size", "2"], "--static-batch-size has no effect here"),
        (["--batching", "static", "--batch-timeout-ms", "2"], "--batch-timeout-ms has no effect here: it is for dynamic batching"),
        (["--max-model-len", "8"], "none of 32 requests was served"),
    ],
)
def test_mistakes_are_told_in_a_line(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["compare", *flags]) in (1, 2)
    reported = capsys.readouterr()
    [line] = reported.err.splitlines()
    assert says in line
    assert not reported.out


def test_policies_in_python_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = 'from chairlift import Policy\n\nclass Compared(Policy):\n    """x"""\n    def rank(self, request):\n        return 0\n'
    Path("compared.py").write_text(policy)
    assert status(["compare", "--run", "--policy", "fcfs,compared.py:Compared"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "Compared: policies in Python are simulated only, without --run" in line


def test_the_command_explains_itself_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(["compare", "--help"])
    assert left.value.code == 0
    assert "chairlift compare" in capsys.readouterr().out.split("examples:")[1]
