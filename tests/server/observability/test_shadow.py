"""The server shows what its shadow reports, to the operator only."""

import asyncio
import io
import json
import sys

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from chairlift.cli.main import main
from chairlift.cli.top import frame
from chairlift.server.lifecycle import Lifecycle, ModelState
from chairlift.server.observability.metrics import Metrics, collect, render
from chairlift.server.observability.shadow import Shadow

LABELS = {"model_name": "m", "engine": "0"}


def figures(ttft):
    numbers = {
        "requests": 3,
        "preemptions": 1,
        "cached_share": 0.5,
        "time_per_output_token_p50_s": None,
        "time_per_output_token_p99_s": None,
    }
    return {**numbers, "ttft_p50_s": ttft, "ttft_p99_s": 2 * ttft}


def report():
    runs = {"simulated": figures(0.5), "shadow": figures(0.25), "recorded": figures(0.51)}
    change = {"ttft_p99_s": {"change": -0.5, "low": -0.6, "high": -0.4}}
    proposal = {"settings": "max_num_seqs=8", "figures": change, "text": "max_num_seqs=8 for the last hour's 300 requests"}
    shown = {"settings": "scheduling_policy=fair", "window_s": 60, "covered": 0.75, "failure": None, "proposal": proposal}
    return {**shown, "runs": runs, "tenants": {"few": runs}, "sessions": {}}


def reporting(*lines):
    """A shadow whose process prints these lines and then waits."""
    program = f"import time\nfor line in {lines!r}:\n    print(line, flush=True)\ntime.sleep(600)"
    return Shadow([sys.executable, "-c", program], LABELS)


def reported(shadow):
    """Runs the shadow until its first report, and ends it."""

    async def run():
        task = asyncio.create_task(shadow.run(asyncio.sleep(0)))
        while shadow.report is None:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_a_policy_prints_is_no_report(monkeypatch, capfd, tmp_path):
    def follow(shadow, report, goes_on):
        print("the queue is long")
        report({"settings": "x"})

    monkeypatch.setattr("chairlift.sim.shadow.follow", follow)
    monkeypatch.setattr("chairlift.sim.shadow.Shadow", lambda file, settings: None)
    monkeypatch.setattr("os.nice", lambda steps: None)
    (tmp_path / "p.py").write_text("from chairlift import Policy\nprint('imported')\nclass Loud(Policy):\n    pass\n")
    assert main(["shadow", str(tmp_path / "day.journal"), "--policy", f"{tmp_path}/p.py:Loud", "--json"]) == 0
    written = capfd.readouterr()
    assert json.loads(written.out) == {"settings": "x"}
    assert "imported\nthe queue is long" in written.err


def test_the_last_report_is_in_the_metrics_of_the_operator_alone():
    shadow = reporting(json.dumps(report()))
    reported(shadow)
    metrics = Metrics("m", list)
    metrics.registry.register(shadow)
    families = collect([metrics])
    text = render(families).decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples if "shadow" in one.name]
    ttft = {(one.labels["run"], one.labels["quantile"]): one.value for one in samples if one.name.endswith("first_token_seconds")}
    assert ttft["simulated", "0.5"] == 0.5
    assert ttft["shadow", "0.99"] == 0.5
    assert {one.labels.get("tenant") for one in samples} == {"few", None}
    assert [one.value for one in samples if one.name == "chairlift_shadow_covered_share"] == [0.75]
    assert not [one for one in samples if "inter_token" in one.name], "they are unknown"
    proposed = {one.labels["bound"]: one.value for one in samples if one.labels.get("setting") == "max_num_seqs=8"}
    assert proposed == {"estimate": -0.5, "low": -0.6, "high": -0.4}
    assert b"shadow" not in render(families, "few")


def test_one_that_ends_is_reported_and_leaves_no_figures(caplog):
    shadow = Shadow([sys.executable, "-c", "print('{}'); raise SystemExit(3)"], LABELS)
    asyncio.run(shadow.run(asyncio.sleep(0)))
    assert "ended with status 3" in caplog.text
    assert shadow.report is None


def test_one_that_ignores_signals_ends_with_the_server():
    program = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('{}', flush=True)\nsignal.pause()"
    reported(Shadow([sys.executable, "-c", program], LABELS))


def test_it_begins_when_a_model_that_loads_on_demand_is_loaded(monkeypatch):
    shadow, processes, begin = Shadow([sys.executable, "-c", ""], LABELS), [], asyncio.create_subprocess_exec

    async def begun(*command, **settings):
        processes.append(command)
        return await begin(*command, **settings)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begun)

    async def run():
        lifecycle = Lifecycle(ModelState.UNLOADED)
        task = asyncio.create_task(shadow.run(lifecycle.until_available()))
        for change in (lifecycle.loading, lifecycle.load_failed, lifecycle.loading):
            change()
            await asyncio.sleep(0.01)
            assert not task.done()
            assert not processes
        lifecycle.ready()
        await task

    asyncio.run(run())
    assert len(processes) == 1


def test_it_needs_a_journal_and_settings_that_exist(capsys, tmp_path):
    def refused(*flags):
        assert main(["serve", "--load-format", "none", *flags]) == 2
        return capsys.readouterr().err

    journal = ("--journal", str(tmp_path / "day.journal"))
    assert "need --journal FILE" in refused("--shadow-policy", "fair")
    assert "scheduling_policy" in refused(*journal, "--shadow-policy", "fairest")
    assert "there is no such file" in refused(*journal, "--shadow-policy", "none.py:Mine")
    assert "no_such" in refused(*journal, "--shadow-set", "no_such=1")
    assert "one value of each setting" in refused(*journal, "--shadow-policy", "fair,vtc")


def lines_of_top(report):
    load = {"slots": 0, "kv_cache": 0, "saturation": 0}
    state = {"stats": {}, "load": load, "samples": [], "stuck": False, "state": "ready", "model": "m", "kv_map": "", "running": []}
    console = Console(width=120, file=io.StringIO())
    console.print(frame({**state, "latency": {"window": None}, "shadow": report}, console))
    return [line.strip() for line in console.file.getvalue().splitlines()]


def test_top_shows_tenants_and_sessions_too():
    runs = report()["runs"]
    sessions = {f"few/\x1b[31ms{number}": runs for number in range(5)}
    lines = lines_of_top(report() | {"tenants": {"few": runs, "many": runs}, "sessions": sessions})
    assert any(line.startswith("many: shadow") for line in lines)
    assert sum(line.startswith("few/?[31ms") for line in lines) == 6, "two runs of three sessions"


def test_top_shows_the_runs_side_by_side():
    lines = lines_of_top(report())
    assert any("shadow: scheduling_policy=fair, 75% covered" in line for line in lines)
    assert any(line.split()[:4] == ["shadow", "3", "250", "ms"] for line in lines)
    assert "proposal: max_num_seqs=8 for the last hour's 300 requests" in lines
