import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from chairlift.cli import main, run_batch

LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}})


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command with an engine that answers everything with one line; returns its status and messages."""
    loads = []

    async def answer_file(config, server, storage, source, started):
        loads.append(source)
        id, _ = storage.files.write_output(["the answer"])
        return SimpleNamespace(failed=0, fields={"output_file_id": id, "error_file_id": None})

    def run(text, target, *flags):
        (tmp_path / "in.jsonl").write_text(text)
        status = main.main(["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(target), *flags])
        return status, capsys.readouterr().err, len(loads)

    monkeypatch.setattr(run_batch, "answer_file", answer_file)
    return run


@pytest.mark.parametrize(
    ("text", "fault"), [("{", "line 1: the line is not valid JSON"), (f"{LINE}\n{LINE}", "line 2: the custom_id 'a' is there twice")]
)
def test_a_faulty_input_is_named_before_a_model_is_loaded(run, tmp_path, text, fault):
    status, message, loads = run(text, tmp_path / "out.jsonl")
    assert (status, loads) == (2, 0)
    assert f"in.jsonl, {fault}" in message
    assert not (tmp_path / "out.jsonl").exists()


def test_an_input_may_begin_with_a_byte_order_mark_and_is_a_file(run, tmp_path, capsys):
    assert run(f"\ufeff{LINE}", tmp_path / "out.jsonl") == (0, "", 1)
    assert main.main(["run-batch", "-i", str(tmp_path), "-o", str(tmp_path / "out.jsonl")]) == 2
    assert capsys.readouterr().err == f"chairlift: -i {tmp_path}: it is no regular file, and is read twice\n"


def test_an_output_that_cannot_be_written_is_named_before_a_model_is_loaded(run, tmp_path):
    status, message, loads = run(LINE, tmp_path / "no" / "out.jsonl")
    assert (status, loads) == (2, 0)
    assert message == f"chairlift: -o {tmp_path}/no/out.jsonl: cannot be written (No such file or directory)\n"


def test_the_input_is_not_replaced_by_the_answers(run, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    for target in (tmp_path / "in.jsonl", tmp_path / "link.jsonl"):
        status, message, loads = run(LINE, target)
        assert (status, message, loads) == (2, f"chairlift: -o {target} is the input: name another file\n", 0)
    assert (tmp_path / "in.jsonl").read_text() == LINE


def test_an_earlier_output_is_replaced(run, tmp_path):
    (tmp_path / "out.jsonl").write_text("much longer than the answer\n")
    assert run(LINE, tmp_path / "out.jsonl") == (0, "", 1)
    assert (tmp_path / "out.jsonl").read_text() == "the answer\n"


@pytest.mark.parametrize("flags", [(), ("--data-dir", "data")])
def test_answers_that_cannot_be_written_are_kept(run, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    status, message, _ = run(LINE, "/dev/full", *flags)
    assert (status, message.partition(";")[0]) == (2, "chairlift: -o /dev/full: cannot be written (No space left on device)")
    [path] = re.findall(r"the answers are in (\S+)\n", message)
    assert Path(path).read_text() == "the answer\n"
    if not flags:
        shutil.rmtree(Path(path).parents[1])
