"""The log of `benches/gpu`: what a run that was cut short leaves, and what the next one does with it. No device, no torch."""

import json
import sys
from pathlib import Path

import pytest

MACHINE = {"GPU": "NVIDIA X", "torch": "2.15.0", "dry": False}


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Begins a run of a script with a log in a directory of the test's, and returns it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benches" / "gpu"))
    monkeypatch.delitem(sys.modules, "results", raising=False)
    import common
    from results import Results

    def started(only=(), machine=MACHINE, seconds=60.0, lost=()):
        results = Results("smoke", tmp_path, machine, lambda part: bool(only) and part.startswith(only), lost)
        return common.Run(results, seconds, False, 0, only, lost)

    yield started
    for name in ("ahead", "common", "results"):
        sys.modules.pop(name, None)


def failing(run):
    run.row("Checks", {"check": "begun", "good": "yes"})
    raise RuntimeError("no device")


def test_a_part_that_is_done_is_not_run_again_and_its_rows_stay(start, tmp_path):
    run, ran = start(), []

    def works():
        ran.append("works")
        number = run.row("Checks", {"check": "one", "good": "yes"})
        run.more(number, {"us": 2.0})
        run.keep(rate=3.0)

    assert run.part("works", works)
    assert not run.part("fails", lambda: failing(run))
    assert run.finish() == 1

    run = start()
    assert run.results.values == {"rate": 3.0}
    assert run.part("works", lambda: ran.append("again"))
    assert ran == ["works"]
    assert run.part("fails", lambda: run.more(run.row("Checks", {"check": "two", "good": "yes"}), {"us": 4.0}))
    assert run.finish() == 0
    page = (tmp_path / "smoke.md").read_text()
    assert "| one | yes | 2 |\n| two | yes | 4 |" in page
    assert "begun" not in page  # it belonged to the try that failed


def test_every_result_is_in_the_log_as_soon_as_it_is_known(start, tmp_path):
    run = start()

    def killed():
        run.row("Checks", {"check": "one", "found": float("nan")})
        lines = [json.loads(line) for line in (tmp_path / "smoke.jsonl").read_text().splitlines()]
        assert lines[-1] == {"part": "a", "table": "Checks", "number": 0, "row": {"check": "one", "found": None}}
        assert "| one | " in (tmp_path / "smoke.md").read_text()

    assert run.part("a", killed)
    # As a process leaves it that is killed while it writes.
    with (tmp_path / "smoke.jsonl").open("a") as log:
        log.write('{"part": "b", "te')
    assert list(start().results.ends) == ["a"]


def test_a_part_whose_check_is_wrong_is_run_again(start):
    from results import NO

    run = start()
    assert not run.part("a", lambda: run.row("Checks", {"check": "one", "good": NO}))
    assert run.results.ends == {"a": "wrong"}
    assert run.finish() == 1
    assert start().results.ends == {}


def test_only_names_the_parts_to_run_even_if_they_are_done(start):
    run = start()
    for name in ("decode", "decode-64", "prefill"):
        assert run.part(name, lambda: None)
    run, ran = start(only=("decode",)), []
    for name in ("decode", "decode-64", "prefill", "other"):
        run.part(name, lambda name=name: ran.append(name))
    assert ran == ["decode", "decode-64"]
    assert run.results.ends == dict.fromkeys(("prefill", "decode", "decode-64"), "done")


def test_rows_of_parts_that_are_kept_stay_complete(start):
    run = start()

    def completed():
        run.results.add("b", of=run.row("Times", {"kernel": "two"}), more={"other us": 2.0})

    for name in ("a", "b"):
        run.part(name, completed if name == "b" else lambda: [run.row("Times", {"kernel": "one"}) for _ in range(2)])
    for _ in range(2):
        log = start(only=("a",)).results.log
        assert [record["of"] for record in map(json.loads, log.read_text().splitlines()) if "of" in record] == [0]


def test_a_part_that_does_not_fit_into_the_time_is_skipped_and_run_next_time(start):
    run = start(seconds=5.0)
    assert not run.part("long", lambda: pytest.fail("there was no time"), needs=10)
    assert run.results.ends == {"long": "skipped"}
    assert run.finish() == 0
    assert start().part("long", lambda: None)


def test_results_of_another_machine_are_not_kept(start, tmp_path, capsys):
    run = start()
    assert run.part("a", lambda: None)
    run = start(machine=MACHINE | {"GPU": "NVIDIA Y"})
    assert run.results.ends == {}
    assert "is of another machine" in capsys.readouterr().out
    assert json.loads((tmp_path / "smoke.jsonl").read_text())["machine"]["GPU"] == "NVIDIA Y"


def test_parts_that_are_not_done_are_compiled_ahead_and_ended_in_time(start, tmp_path):
    from ahead import Ahead

    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys, time\nout = pathlib.Path(sys.argv[-1])\nout.mkdir()\n(out / 'began').touch()\ntime.sleep(600)\n"
    )
    run = start()
    run.memory = 80 << 30
    assert run.part("done", lambda: None)
    ahead = Ahead(run, str(script), ("done", "8B", "fp8"))
    children = ahead.children
    assert [child.args[1:4] for child in children] == [[str(script), "--only", part] for part in ("8B", "fp8")]
    folders = [Path(child.args[-1]) for child in children]
    while not all((folder / "began").exists() for folder in folders):
        assert all(child.poll() is None for child in children)
    ahead.end()
    assert all(child.returncode == -9 for child in children)
    assert not any(folder.exists() for folder in folders)
    # Not from within one of them.
    run = start(only=("8B",))
    run.memory = 80 << 30
    assert Ahead(run, str(script), ("8B",)).children == []


def test_another_process_goes_on_behind_a_part_that_lost_the_device(start, monkeypatch):
    import common

    def replaced(path, command, environment):
        raise SystemExit(environment[common.LOST], environment[common.LEFT])

    monkeypatch.setattr(common.os, "execve", replaced)
    monkeypatch.setattr(common, "device_is_lost", lambda: True)
    run, ended = start(lost=("earlier",)), []
    run.at_end.append(lambda: ended.append("helpers"))
    assert run.part("works", lambda: None)
    with pytest.raises(SystemExit) as end:
        run.part("bad", lambda: failing(run))
    assert end.value.args[0] == "earlier,bad"
    assert 0 < float(end.value.args[1]) <= 60
    assert ended == ["helpers"]

    run, ran = start(lost=("earlier", "bad")), []
    for name in ("works", "bad", "next"):
        run.part(name, lambda name=name: ran.append(name))
    assert ran == ["next"]
    assert run.results.ends == {"works": "done", "bad": "failed", "next": "done"}
    assert run.finish() == 1
    # A run of another day tries it again.
    assert start().part("bad", lambda: None)
