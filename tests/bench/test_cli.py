import json
import os
import signal
import socket
import subprocess
import sys

import pytest

import chairlift.cli.bench_load
from chairlift.bench.record import Record, Run
from chairlift.cli.main import main


@pytest.fixture(scope="module")
def port(byte_model):
    """A real server, without a model: tokens at once."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "chairlift.cli.main",
        "serve",
        str(byte_model),
        "--load-format",
        "none",
        "--served-model-name",
        "bytes",
    ]
    server = subprocess.Popen([*command, "--port", str(port), "--log-level", "warning"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    yield port
    server.send_signal(signal.SIGTERM)
    server.wait(30)


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


@pytest.mark.slow
def test_a_real_server(port, tmp_path, capsys):
    results = ["--save-detailed", "--result-dir", tmp_path / "new", "--result-filename", "r.json", "--report", tmp_path / "r.html"]
    load = ["--num-prompts", 20, "--request-rate", 200, "--random-input-len", 5, "--random-output-len", 4, "--ignore-eos"]
    goodput = ["--goodput", "ttft:60000", "tpot:60000", "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99"]
    assert bench("serve", "--port", port, "--ready-check-timeout-sec", 60, *load, *goodput, *results, "--metadata", "a=b") == 0
    reported = capsys.readouterr().out
    assert reported.startswith(f"20 requests to bytes at http://127.0.0.1:{port}/v1/completions: 200 a second (Poisson)")
    assert "Successful requests:                     20        " in reported
    assert "Total generated tokens:                  80        " in reported
    assert "P99 E2EL (ms):" in reported
    found = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (found["completed"], found["failed"], found["goodput_attainment"], found["a"]) == (20, 0, 1.0, "b")
    assert found["output_lens"] == [4] * 20
    assert [record["requested_tokens"] for record in found["records"]] == [4] * 20
    assert found["p50_e2el_ms"] == found["median_e2el_ms"] > 0
    assert "Serving benchmark" in (tmp_path / "r.html").read_text()


@pytest.mark.slow
def test_a_trace_goes_without_what_is_too_long(port, tmp_path, capsys):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,3,2\n0.1,3,600\n0.2,4,3\n")
    command = ["serve", "--port", port, "--ready-check-timeout-sec", 60, "--dataset-path", trace]
    assert bench(*command, "--speedup", 10, "--ignore-eos", "--disable-tqdm") == 0
    reported = capsys.readouterr().out
    assert "1 of 3 requests exceed the server's limit of 504 tokens and are left out." in reported
    assert "at the trace's times, 10 times as fast" in reported
    assert "Total generated tokens:                  5 " in reported


@pytest.mark.slow
def test_a_sweep_of_a_real_server(port, tmp_path, capsys):
    load = ["--num-prompts", 4, "--random-input-len", 5, "--random-output-len", 4, "--ignore-eos", "--num-warmups", 0]
    result = [
        "--goodput",
        "e2el:60000",
        "--report",
        tmp_path / "s.html",
        "--save-result",
        "--result-dir",
        tmp_path,
        "--result-filename",
        "s",
    ]
    assert bench("sweep", "--port", port, "--max-concurrencies", "1,2", *load, *result) == 0
    reported = capsys.readouterr().out
    assert "Largest load with 95 % of requests within E2EL ≤ 60000 ms: 2 at a time" in reported
    found = json.loads((tmp_path / "s").read_text())
    assert found["knee"] == 2
    assert (found["request_rate"], found["max_concurrency"], found["burstiness"]) == ("inf", [1, 2], 1)
    assert "1, 2 at a time, each when another has finished" in (tmp_path / "s.html").read_text()
    assert [point["completed"] for point in found["points"]] == [4, 4]
    assert "By load" in (tmp_path / "s.html").read_text()
    saved = ["--save-result", "--result-dir", tmp_path / "named", "--burstiness", "inf"]
    assert bench("sweep", "--port", port, "--request-rates", "100", *load, *saved) == 0
    [file] = (tmp_path / "named").iterdir()
    assert file.name.startswith("openai-sweep-bytes-")
    found = json.loads(file.read_text())
    assert (found["request_rate"], found["max_concurrency"], found["burstiness"]) == ([100.0], None, "inf")


@pytest.mark.parametrize("name", ["throughput", "latency"])
def test_without_a_server(byte_model, tmp_path, capsys, name):
    count = {"throughput": ["--num-prompts", 3], "latency": ["--batch-size", 3, "--num-iters", 2, "--num-iters-warmup", 1]}[name]
    model = ["--model", byte_model, "--load-format", "none", "--input-len", 6, "--output-len", 5]
    assert bench(name, *count, *model, "--output-json", tmp_path / "o.json") == 0
    reported, found = capsys.readouterr().out, json.loads((tmp_path / "o.json").read_text())
    if name == "throughput":
        assert "Total num output tokens:  15" in reported
        assert found["num_requests"] == 3
    else:
        assert "99% percentile latency: " in reported
        assert len(found["latencies"]) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--goodput", "itl:5"], "--goodput itl:5: expected pairs like ttft:500"),
        (["serve", "--percentile-metrics", "ttft,x"], "--percentile-metrics x: expected some of ttft,tpot,itl,e2el"),
        (["serve", "--dataset-name", "sharegpt"], "--dataset-name sharegpt needs --dataset-path"),
        (["serve", "--dataset-name", "random", "--dataset-path", "t.csv"], "exclude each other"),
        (["serve", "--header", "a"], "a: expected KEY=VALUE"),
        (["serve", "--result-dir", "/", "--result-filename", "tmp"], "--result-filename: /tmp is a directory"),
        (["serve", "--model", "m", "--self-timed"], "--self-timed needs a --dataset-path"),
        (["serve", "--model", "m", "--ramp-up-strategy", "linear"], "--ramp-up-strategy needs --ramp-up-start-rps"),
        (["serve", "--model", "m", "--speedup", "2"], "--speedup needs a --dataset-path"),
        (["serve", "--model", "m", "--ramp-up-end-rps", "4"], "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy"),
        (["serve", "--model", "m", "--dataset-path", "/nowhere"], "/nowhere: cannot be read"),
        (["sweep", "--model", "m"], "a search needs targets: set --goodput"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_sent(arguments, says, capsys):
    assert bench(*arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("server", [["--port", 1], ["--base-url", "http://127.0.0.1:1/v1"], ["--url", "http://127.0.0.1:1"]])
def test_a_server_that_is_missing_is_a_failure(capsys, server):
    assert bench("serve", *server) == 1
    assert "no server at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--num-prompts", "0"], "--num-prompts/--num-requests: expected a whole number from 1 to 100,000,000, got 0"),
        (["serve", "--num-warmups", "-1"], "--num-warmups: expected a whole number from 0 to 1,000,000, got -1"),
        (["serve", "--request-rate", "-1"], "--request-rate: expected a number from 1e-06 to 1,000,000, or inf, got -1"),
        (["serve", "--burstiness", "1e-9"], "--burstiness: expected a number from 0.01 to 1,000,000, or inf, got 1e-9"),
        (["serve", "--random-range-ratio", "1"], "--random-range-ratio: expected a number from 0 to 0.999, got 1"),
        (["serve", "--metric-percentiles", "50,101"], "--metric-percentiles: expected a number from 0 to 100, got 101"),
        (["sweep", "--metric-percentiles", "50"], "unrecognized arguments: --metric-percentiles 50"),
        (["sweep", "--request-rates", "1,inf"], "--request-rates: expected a number from 1e-06 to 1,000,000, got inf"),
        (["sweep", "--request-rates", "1", "--max-concurrencies", "2"], "--max-concurrencies: not allowed with argument --request-rates"),
        (["throughput", "--output-json", "/nowhere/at/all"], "--output-json: /nowhere/at/all: there is no directory /nowhere/at"),
        (["latency", "--output-json", "/tmp"], "--output-json: /tmp is a directory: name a file"),
        (["serve", "--report", "/nowhere/at/all.html"], "--report: /nowhere/at/all.html: there is no directory /nowhere/at"),
        (["serve", "--result-dir", "/dev/null/x"], "--result-dir: /dev/null/x: /dev/null is a file"),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_is_allowed(arguments, says, capsys):
    with pytest.raises(SystemExit) as caught:
        bench(*arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_sharegpt_has_other_prompts_at_each_load(monkeypatch, tmp_path, capsys):
    runs = []

    def measure(target, jobs, **_):
        runs.append({job.text for job in jobs})
        return Run([Record(0.0, failure="unsent") for _ in jobs])

    monkeypatch.setattr(chairlift.cli.bench_load, "measure", measure)
    talk = [{"conversations": [{"value": f"question {number}"}, {"value": "answer"}]} for number in range(1000)]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    bench("sweep", "--model", "m", "--dataset-path", tmp_path / "talk.json", "--max-concurrencies", "8,8", "--disable-tqdm")
    assert [len(run) for run in runs] == [32, 32]
    assert len(runs[0] & runs[1]) < 8


def test_a_sweep_repeats_a_short_trace_until_the_duration_ends(monkeypatch, tmp_path, capsys):
    runs = []

    def measure(target, jobs, **_):
        runs.append(jobs)
        return Run([Record(0.0, sent=0.1, end=0.2, times=[0.15, 0.2], output_tokens=2) for _ in jobs])

    monkeypatch.setattr(chairlift.cli.bench_load, "measure", measure)
    (tmp_path / "short.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at},20,8\n" for at in range(30)))
    load = ["--dataset-path", tmp_path / "short.csv", "--request-rates", "10,20", "--duration", "10", "--burstiness", "inf"]
    assert bench("sweep", "--model", "m", *load, "--goodput", "ttft:1000") == 0
    assert [len(jobs) for jobs in runs] == [100, 200]
    assert [jobs[-1].due for jobs in runs] == pytest.approx([9.9, 9.95])
    assert len({job.prompt() for jobs in runs for job in jobs}) == 300
    assert "20 requests a second, the highest that was tried" in capsys.readouterr().out


@pytest.mark.slow
def test_each_run_of_a_sweep_has_prompts_of_its_own_at_its_rate(monkeypatch, capsys):
    runs = []

    def measure(target, jobs, **_):
        runs.append(jobs)
        return Run([])

    monkeypatch.setattr(chairlift.cli.bench_load, "measure", measure)
    assert bench("sweep", "--model", "m", "--request-rates", "10,20", "--burstiness", "inf", "--random-input-len", 8) == 1
    assert [len(jobs) for jobs in runs] == [300, 600]
    assert [runs[0][1].due, runs[1][1].due] == pytest.approx([0.1, 0.05])
    assert not {job.prompt() for job in runs[0]} & {job.prompt() for job in runs[1]}
