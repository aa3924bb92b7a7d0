"""`chairlift bench` beside servers that fail, and people who do not wait: there is a summary, and an exit status."""

import json
import signal

import pytest
from scripted_server import Scripted

from chairlift.cli.main import main


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs a command against a scripted server with these words as prompts; its exit status, its output, and what it wrote."""

    def run(words, *flags, command="serve"):
        talk = [{"conversations": [{"value": word}, {"value": "a reply of a few tokens"}]} for word in words]
        (tmp_path / "talk.json").write_text(json.dumps(talk))
        result = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
        with Scripted().elsewhere() as url:
            requested = ["bench", command, "--base-url", url, "--dataset-path", str(tmp_path / "talk.json"), *result, *flags]
            status = main(requested)
        reported = capsys.readouterr()
        return status, reported.out + reported.err, json.loads((tmp_path / "r.json").read_text()) if (tmp_path / "r.json").exists() else {}

    return run


def test_a_server_that_dies_on_the_way(bench):
    status, reported, found = bench(["good"] * 20 + ["die"] + ["good"] * 20, "--max-concurrency", "1")
    assert 0 < found["failed"] < 41, "those before it were answered"
    assert set(found["failures"]) <= {"connection lost", "no connection"}
    assert found["completed"] + found["failed"] == 41
    assert status == (0 if found["completed"] else 1)
    assert "of 41 requests failed, most often with no connection: " in reported


def test_a_server_that_only_fails(bench):
    status, reported, found = bench(["broken"] * 5, "--num-warmups", "0")
    assert (status, found["completed"], found["failures"]) == (1, 0, {"HTTP 500": 5})
    assert "Failed requests:                         5 " in reported
    assert "Note: 5 of 5 requests failed, most often with HTTP 500: out of memory (see --save-detailed)." in reported


def test_a_server_that_fails_at_once_is_told_without_a_run(bench):
    status, reported, found = bench(["broken"], "--extra-body", '{"prompt": "broken"}')
    assert (status, found) == (1, {})
    assert "failed: HTTP 500: out of" in reported


@pytest.mark.slow
def test_a_server_that_hangs(bench):
    status, reported, found = bench(["silent", "silent", "good"], "--request-timeout", "2")
    assert (status, found["completed"], found["failures"]) == (0, 1, {"timed out": 2})
    assert "most often with timed out: no end within 2 s" in reported


@pytest.mark.parametrize("word", ["torn", "odd", "cut", "backwards", "garbage"])
@pytest.mark.slow
def test_a_server_that_speaks_nonsense(bench, word):
    status, reported, found = bench([word], "--num-warmups", "0")
    assert (status, found["failed"]) == (1, 1)
    assert "Traceback" not in reported


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_tells_what_there_is(bench, processes, tmp_path):
    rate = ["--processes", processes, "--request-rate", "4", "--burstiness", "inf"]
    words = ["good"] * 3 + ["interrupt", "silent"]
    before = signal.getsignal(signal.SIGINT)
    status, reported, found = bench(words, *rate, "--report", str(tmp_path / "r.html"))
    assert status == 130
    assert 0 < found["completed"] < 5
    assert f"Note: Interrupted: {found['completed']} of 5 requests had ended; the figures cover these." in reported
    assert f"Successful requests:                     {found['completed']} " in reported
    assert found["failed"] == 0, "what was under way is in no figure"
    assert (tmp_path / "r.html").exists()
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_with_what_there_is(bench):
    status, _, found = bench(["good"] * 15 + ["interrupt"], "--max-concurrencies", "1,2", "--num-prompts", "4", command="sweep")
    assert status == 130
    assert len(found["points"]) < 2
    assert all(point["failed"] == 0 for point in found["points"])
