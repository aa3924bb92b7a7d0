"""What `benches/gpu/pack.py` lets travel. Nothing is built or downloaded here."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benches" / "gpu" / "pack.py"


@pytest.fixture
def pack(monkeypatch, tmp_path):
    """The script, with an extension of 1 MiB, no tracked files, and wheels in a directory of the test's."""
    spec = importlib.util.spec_from_file_location("pack", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = tmp_path / "checkout"
    (root / ".whl").mkdir(parents=True)
    (root / "core.so").write_bytes(bytes(1 << 20))
    for name, value in {"ROOT": root, "WHEELS": root / ".whl", "EXTENSION": root / "core.so"}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "_build", lambda: None)
    monkeypatch.setattr(module, "_download", lambda python: None)
    monkeypatch.setattr(module, "_tracked", lambda: 0)
    monkeypatch.setattr("sys.argv", ["pack.py"])
    return module


def wheel(pack, mib):
    with (pack.WHEELS / "x.whl").open("wb") as file:
        file.truncate(mib << 20)


def test_it_prints_how_to_begin(pack, capsys):
    wheel(pack, 63)
    pack.main()
    said = capsys.readouterr().out
    assert "extension 1.0 MiB, wheels 63.0 MiB" in said
    assert f"begin there with\n\n{pack.PREFIX}\n" in said


def test_more_than_64_mib_are_refused(pack):
    wheel(pack, 64)
    with pytest.raises(SystemExit, match=r"together 65\.0 MiB, more than 64"):
        pack.main()
