"""Files of settings that cannot be used are found before a model is read."""

import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.file_checks import check_files
from chairlift.engine.journal import Journal, check_journal
from chairlift.errors import ChairliftError, InvalidSetting, ModelNotFound


def bad_settings(tmp_path):
    """Settings that name files or directories which cannot be used, and what the error says."""
    (file := tmp_path / "file").write_text("no directory")
    (open_to_all := tmp_path / "open").mkdir()
    open_to_all.chmod(0o777)
    (low := tmp_path / "low").mkdir()
    (low / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 64, "lora_alpha": 1}))
    (high := tmp_path / "high").mkdir()
    (high / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 64, "lora_alpha": 1}))
    layer = "base_model.model.model.layers.0.mlp.up_proj"
    matrices = {f"{layer}.lora_A.weight": np.zeros((64, 8), np.float32), f"{layer}.lora_B.weight": np.zeros((8, 64), np.float32)}
    save_file(matrices, high / "adapter_model.safetensors")
    lora = {"enable_lora": True}
    return [
        ({"journal": str(file / "day")}, "--journal .*: cannot write there .Not a directory."),
        ({"journal": str(low)}, "--journal .*: cannot write there .Is a directory."),
        ({"prefix_cache_dir": str(file)}, "--prefix-cache-dir .*: this is a file, name a directory"),
        ({"prefix_cache_dir": str(file / "kv")}, "--prefix-cache-dir .*: Not a directory"),
        ({"prefix_cache_dir": str(open_to_all)}, "--prefix-cache-dir .*: the directory must belong to this user"),
        ({"energy_meter": f"powercap:{file}"}, "--energy-meter powercap: .*: Not a directory"),
        ({"energy_meter": "nvml"}, "--energy-meter nvml needs nvidia-ml-py"),
        ({**lora, "lora_modules": {"a": str(tmp_path / "none")}}, "adapter .*none: adapter_config.json cannot be read"),
        ({**lora, "lora_modules": {"a": str(low)}}, "adapter .*low: adapter_model.safetensors is missing"),
        ({**lora, "lora_modules": {"a": str(high)}}, "adapter .*high has rank 64, above --max-lora-rank 16"),
    ]


@pytest.mark.parametrize("at", range(10))
def test_files_are_checked_before_the_model_is_read(at, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    settings, message = bad_settings(tmp_path)[at]
    config = EngineConfig(model=str(tmp_path / "no-model"), **settings)
    with pytest.raises(ChairliftError, match=f"^{message}[^\n]*$"):
        check_files(config)
    with pytest.raises(ChairliftError, match=f"^{message}[^\n]*$"):
        Engine(config)


def test_files_that_can_be_used_are_left_as_they_are(tmp_path):
    (journal := tmp_path / "day.journal").write_text("yesterday")
    config = EngineConfig(model=str(tmp_path / "no-model"), journal=str(journal), prefix_cache_dir=str(tmp_path / "kv"))
    check_files(config)
    assert journal.read_text() == "yesterday"
    check_files(EngineConfig(journal=str(tmp_path / "new.journal")))
    assert not (tmp_path / "new.journal").exists()
    with pytest.raises(ModelNotFound):
        Engine(config)
    assert journal.read_text() == "yesterday"
    with pytest.raises(ModelNotFound):
        Engine(dataclasses.replace(config, journal=str(tmp_path / "new.journal")))
    assert not (tmp_path / "new.journal").exists()


def test_the_journal_of_a_running_engine_is_left_to_it(tmp_path):
    path = tmp_path / "day.journal"
    path.write_text("yesterday")
    journal = Journal(str(path))
    assert path.read_text() == "yesterday", "the engine may fail to start"
    journal.begin()
    journal.append(b"today", flush=True)
    for use in (Journal, check_journal):
        with pytest.raises(InvalidSetting, match=f"--journal {path}: another engine writes it: close that one, or name another file"):
            use(str(path))
    assert path.read_text() == "today"
    journal.close()
    check_journal(str(path))


def test_an_engine_has_its_journal_while_it_loads_and_leaves_it_if_that_fails(tmp_path, monkeypatch):
    (path := tmp_path / "day.journal").write_text("yesterday")

    def load(model, *rest):
        with pytest.raises(InvalidSetting, match="another engine writes it"):
            Engine(EngineConfig(model=model, journal=str(path)))
        raise ModelNotFound("there is none")

    monkeypatch.setattr("chairlift.engine.engine.locate", load)
    with pytest.raises(ModelNotFound) as failed:
        Engine(EngineConfig(model="m", journal=str(path)))
    check_journal(str(path))  # although the error still refers to the engine
    assert path.read_text() == "yesterday"
    del failed


def test_the_journal_of_a_restarted_engine_keeps_those_before_it(tmp_path):
    path = tmp_path / "day.journal"
    Journal(str(path)).close()
    restarted = Journal(f"{path}.1")
    with pytest.raises(InvalidSetting, match="another engine writes it"):
        check_journal(str(path))
    restarted.close()
    check_journal(str(path))


def test_a_forked_process_neither_holds_nor_writes_the_journal(tmp_path):
    path = tmp_path / "day.journal"
    journal = Journal(str(path))
    journal.append(b"once", flush=False)
    ends, goes_on = os.pipe()
    if (child := os.fork()) == 0:
        journal.close()
        os.close(goes_on)
        os.read(ends, 1)
        os._exit(0)
    os.close(ends)
    journal.close()
    assert path.read_bytes() == b"once"
    check_journal(str(path))
    os.close(goes_on)
    assert os.waitpid(child, 0)[1] == 0


def test_the_journal_of_an_engine_that_was_dropped_is_free(tmp_path):
    path = tmp_path / "day.journal"
    dropped = SimpleNamespace(journal=Journal(str(path)))
    dropped.itself = dropped
    del dropped
    check_journal(str(path))
