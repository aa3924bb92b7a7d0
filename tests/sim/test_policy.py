"""Policies in Python decide in the simulator, and a wrong one is replaced."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cpu_cost import cost
from journals import watched
from traces import CONV, workload

from chairlift import EngineConfig, Policy, _core, simulate
from chairlift.bench.sessions import RecordedSession, SessionTurn
from chairlift.bench.traces import TraceRequest
from chairlift.cli.main import main
from chairlift.errors import InvalidSetting
from chairlift.sim.models import SharedModel, simulate_models
from chairlift.sim.policy import load, use
from chairlift.sim.replay import Recording
from chairlift.sim.sessions import simulate_sessions

SIZES = {"model": "SmolLM2-135M", "max_num_seqs": 2, "num_kv_blocks": 200, "max_model_len": 1024}
TRACE = [TraceRequest(index * 1e-4, 20 + 37 * index % 300, 1 + 13 * index % 90) for index in range(60)]


class Lifo(Policy):
    """the last to arrive"""

    def rank(self, request):
        return 2**62 - request.arrived


class Least(Policy):
    """the least remaining work"""

    orders_prompts = True
    cache = "when_queued"
    preemption = "free"

    def rank(self, request):
        return request.work_left

    def may_preempt(self, waiting, running):
        return running.work_left > 2 * (waiting.work_left + running.preemption_cost)

    def victim_rank(self, running):
        return running.work_left


def order(result):
    return result.requests["tag"][np.argsort(result.requests["started"], kind="stable")]


def test_the_rank_orders_the_queue():
    lifo = simulate(TRACE, scheduling_policy=Lifo(), **SIZES)
    assert order(lifo)[3] > 50
    assert list(order(simulate(TRACE, **SIZES))) == list(range(60))


def test_one_that_is_written_again_in_python_decides_as_it_does_in_rust():
    assert np.array_equal(
        simulate(TRACE, scheduling_policy=Least(), **SIZES).requests, simulate(TRACE, scheduling_policy="shortest", **SIZES).requests
    )


def test_python_costs_little_of_a_simulation():
    ranked = []

    class Counted(Least):
        def rank(self, request):
            ranked.append(request.work_left)
            return super().rank(request)

    trace = workload(CONV).first(1000)
    in_python, in_rust = (
        partial(simulate, trace, model="Llama-3.1-8B", device="L4", scheduling_policy=policy) for policy in (Counted(), "shortest")
    )
    assert cost(in_python, in_rust) < 3
    assert len(ranked) >= 1000


@pytest.mark.parametrize("answer", ["not a number", None, -1, 2**80])
def test_one_that_returns_nonsense_is_reported_and_replaced(answer, caplog):
    class Nonsense(Policy):
        def rank(self, request):
            return answer

    result = simulate(TRACE, scheduling_policy=Nonsense(), **SIZES)
    assert list(order(result)) == list(range(60))
    assert (
        f"the policy Nonsense failed, and the queue went on in the order of arrival: ValueError: rank() returned {answer!r}" in caplog.text
    )


def test_one_that_raises_is_reported_with_its_line_and_tried_again_in_the_next_run(caplog):
    class Fails(Policy):
        broken = True

        def rank(self, request):
            return 1 // (not self.broken) - request.arrived + 2**60

    policy = Fails()
    assert list(order(simulate(TRACE, scheduling_policy=policy, **SIZES))) == list(range(60))
    assert "ZeroDivisionError" in caplog.text
    assert "of test_policy.py)" in caplog.text
    policy.broken = False
    assert order(simulate(TRACE, scheduling_policy=policy, **SIZES))[3] > 50


class Broken(Policy):
    def rank(self, request):
        raise OSError("no answer")


def sessions(policy, _):
    turns = [SessionTurn(1.0, 64 * (at + 1), 5, at + 1, calls_tool=True) for at in range(4)]
    recorded = [RecordedSession(64, [turns], [0, 0, 1, 2, 3])]
    return [simulate_sessions(recorded, 2, model="SmolLM2-135M", duration=60.0, scheduling_policy=policy).result]


def models(policy, _):
    config = EngineConfig(model="SmolLM2-135M", scheduling_policy=use(policy))
    return simulate_models(TRACE, [SharedModel("one", config), SharedModel("two", config)]).results.values()


def recorded(policy, folder):
    (folder / "day.journal").write_bytes(watched().journal)
    return [Recording(folder / "day.journal").what_if({"scheduling_policy": use(policy)})]


def replicas(policy, _):
    return simulate(TRACE, scheduling_policy=policy, replicas=2, **SIZES).replicas


@pytest.mark.parametrize("run", [sessions, models, recorded, replicas])
def test_every_kind_of_simulation_reports_a_failure(run, tmp_path, caplog):
    """A result keeps what was raised in its own run."""
    results = list(run(Broken(), tmp_path))
    simulate(TRACE, scheduling_policy=type("Broken", (Policy,), {})(), **SIZES)
    assert all("OSError: no answer" in result.policy_failure for result in results)
    assert "the policy Broken failed, and the queue went on in the order of arrival: OSError: no answer (line" in caplog.text


def test_figures_of_a_policy_that_failed_say_so(tmp_path, capsys):
    """The line is the file's, not that of what it called. An exit is a failure too."""
    text = "import json\nfrom chairlift import Policy\nclass {}(Policy):\n    def rank(self, request):\n        {}\n"
    for name, line, error in (("Reads", "json.loads('')", "JSONDecodeError"), ("Quits", "raise SystemExit(3)", "SystemExit: 3")):
        (tmp_path / "p.py").write_text(text.format(name, line))
        arguments = ["simulate", "--trace", str(CONV), "--model", "SmolLM2-135M", "--policy", f"{tmp_path}/p.py:{name}", "--json"]
        assert main([*arguments, "--num-requests", "20"]) == 1
        failure = json.loads(capsys.readouterr().out)["policy_failure"]
        assert failure.startswith(error)
        assert failure.endswith("(line 5 of p.py)")


def test_a_comparison_with_a_policy_that_failed_says_so(tmp_path, capsys):
    (tmp_path / "p.py").write_text("from chairlift import Policy\nclass Mine(Policy):\n    def rank(self, request):\n        1 / 0\n")
    arguments = ["compare", "--batching", "continuous", "--policy", f"fcfs,{tmp_path}/p.py:Mine", "--num-requests", "20", "--json"]
    assert main(arguments) == 1
    failures = [one["policy_failure"] for one in json.loads(capsys.readouterr().out)["variants"]]
    assert failures == [None, "ZeroDivisionError: division by zero (line 4 of p.py)"]


def test_a_file_that_exits_as_it_is_imported_is_told_in_a_line(tmp_path):
    (tmp_path / "p.py").write_text("\nimport sys; sys.exit(3)\n")
    with pytest.raises(InvalidSetting, match=r"p.py cannot be imported: SystemExit: 3 \(line 2 of p.py\)"):
        load(f"{tmp_path}/p.py:Mine")


def test_an_interrupt_during_a_decision_ends_the_simulation():
    class Interrupted(Policy):
        def rank(self, request):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(TRACE, scheduling_policy=Interrupted(), **SIZES)


def test_a_file_may_have_dataclasses_and_any_name(tmp_path):
    lines = ["from __future__ import annotations", "from dataclasses import dataclass", "from chairlift import Policy"]
    lines += ["@dataclass", "class Mine(Policy):", "    weight: int = 3"]
    (tmp_path / "random.py").write_text("\n".join(lines))
    modules = {**sys.modules}
    assert load(f"{tmp_path / 'random.py'}:Mine") == "Mine"
    assert all(sys.modules[name] is module for name, module in modules.items())


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("def __init__(self): {}['weights']", r"KeyError: 'weights' \(line 3 of mine.py\)"),
        ("def __init__(self, weight): ...", "TypeError: .* missing 1 required positional argument: 'weight'"),
    ],
)
def test_a_policy_that_cannot_be_made_is_told_in_a_line(tmp_path, method, fault):
    (tmp_path / "mine.py").write_text(f"from chairlift import Policy\nclass Mine(Policy):\n    {method}\n")
    with pytest.raises(InvalidSetting, match=f"the policy Mine cannot be made: {fault}"):
        load(f"{tmp_path / 'mine.py'}:Mine")


@pytest.mark.parametrize(
    ("attributes", "fault"),
    [
        ({"name": "fcfs"}, "needs a name of its own"),
        ({"grouping": "rows"}, "grouping must be one of single, classes, got"),
        ({"cache": 3}, "cannot be used"),
        ({"grouping": "tenants", "prompt_token": 0}, "cannot be used"),
    ],
)
def test_wrong_attributes_are_refused(attributes, fault):
    with pytest.raises(InvalidSetting, match=fault):
        use(type("Wrong", (Policy,), attributes)())


def test_a_server_runs_none():
    use(Lifo())
    with pytest.raises(ValueError, match="scheduling_policy"):
        _core.Scheduler(scheduling_policy="Lifo")
    with pytest.raises(ValueError, match="expected one of"):
        EngineConfig(scheduling_policy="nobody.py:Nothing")


def test_the_command_begins_one_whose_test_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["policy", "new", "Mine"]) == 0
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert main(["policy", "new", "Mine"]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a b", "class", "Class", "Policy", "Candidate", "Random", "Chairlift", "pytest", "Numpy"])
def test_a_name_that_breaks_the_files_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["policy", "new", name]) == 2
    assert not list(tmp_path.iterdir())


def test_the_page_of_the_laboratory_has_what_its_commands_write_and_print(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/lab.md").read_text()
    monkeypatch.chdir(tmp_path)
    assert main(["policy", "new", "Mine"]) == 0
    _, _, code = Path("mine.py").read_text().partition("\n\n")
    assert f"```python\n{code}```" in page
    shutil.copy(CONV, "conv.csv")
    [command] = re.findall(r"^chairlift (compare [^`]*?) --report page.html$", page, re.MULTILINE)
    capsys.readouterr()
    assert main(command.replace("\\\n", "").split()) == 0
    printed = capsys.readouterr().out.splitlines()
    table = page.partition("The second command prints")[2].split("```")[1].splitlines()[1:]
    assert [line for line in table if line not in printed] == []
    assert len(table) == 3
    assert "Continuous batching, Mine: Goes first: the least remaining work." in printed


def test_a_new_policy_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch, capsys):
    def full(path, *_, **__):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "write_text", full)
    assert main(["policy", "new", "Mine"]) == 2
    assert capsys.readouterr().err == "chairlift: mine.py: cannot be written (No space left on device)\n"
    assert not list(tmp_path.iterdir())


def test_a_file_is_a_policy_for_the_commands_that_simulate(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("from chairlift import Policy\n\n\nclass Mine(Policy):\n    pass\n")
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{index},50,10\n" for index in range(5)))
    file = f"{tmp_path / 'mine.py'}:Mine"
    assert main(["simulate", "--trace", str(trace), "--model", "SmolLM2-135M", "--policy", file]) == 0
    assert main(["compare", "--trace", str(trace), "--model", "SmolLM2-135M", "--policy", f"fcfs,{file}", "--batching", "continuous"]) == 0
    assert "Mine" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["simulate", "--trace", str(trace), "--policy", f"{tmp_path / 'mine.py'}:Other"])
    assert "has no policy 'Other': it has Mine" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--policy", file])
    with pytest.raises(InvalidSetting, match="there is no file"):
        load("absent.py:Mine")
