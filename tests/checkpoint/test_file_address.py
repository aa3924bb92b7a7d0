"""The GGUF file of an https address."""

import json
from pathlib import Path

import pytest
from fake_hub import FakeHub, sha256
from gguf_files import gguf_of, tiny_model

from chairlift import LLM
from chairlift.checkpoint import download
from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.downloads import downloads, find_download
from chairlift.checkpoint.file_address import SOURCE, address_dir, find_file
from chairlift.checkpoint.file_download import download_file
from chairlift.checkpoint.locate import locate
from chairlift.checkpoint.model_name import FileAddress
from chairlift.errors import ModelNotFound

CONTENT = b"GGUF" + bytes(range(256)) * 8


def address(hub: FakeHub, path: str = "/a/m.gguf", content: bytes = CONTENT, etag: str | None = '"1"') -> FileAddress:
    hub.files[path] = content, etag
    return FileAddress(f"{hub.content_url}{path}?key=secret", path.rpartition("/")[2])


def ranges(hub: FakeHub) -> list[str | None]:
    return [headers.get("range") for _, _, headers in hub.requests]


def test_a_file_is_downloaded_once_and_again_when_it_changed(hub: FakeHub, cache: Path) -> None:
    place = address(hub)
    found = download_file(place, cache, progress=False)
    assert (found.name, found.read_bytes()) == ("m.gguf", CONTENT)
    assert find_file(place, cache) == found == download_file(place, cache, progress=False)
    assert len(hub.requests) == 3  # the last one asks for the version
    assert "secret" not in (found.parent / SOURCE).read_text()
    hub.files["/a/m.gguf"] = CONTENT[::-1] + CONTENT, '"2"'
    with pytest.raises(ModelNotFound, match=r"/a/m.gguf is no GGUF file$") as caught:
        download_file(place, cache, progress=False)
    assert "secret" not in str(caught.value)
    assert found.read_bytes() == CONTENT
    hub.files["/a/m.gguf"] = CONTENT + CONTENT, '"2"'
    assert download_file(place, cache, progress=False).read_bytes() == CONTENT + CONTENT
    assert sorted(path.name for path in found.parent.iterdir()) == ["m.gguf", SOURCE]


@pytest.mark.parametrize("etag", ['"1"', 'W/"1"', None])
def test_a_download_goes_on_only_for_the_same_version(hub: FakeHub, cache: Path, etag: str | None) -> None:
    place = address(hub, etag=etag)
    hub.cuts = [len(CONTENT), 100] + [0] * 5
    with pytest.raises(ModelNotFound, match=r"http://.*/a/m.gguf cannot be downloaded: the connection ended after 100 of 2052 bytes"):
        download_file(place, cache, progress=False)
    assert find_file(place, cache) is None
    with pytest.raises(ModelNotFound, match="there is no downloaded model") as caught:
        find_download(f"{place.url}&other")
    assert "secret" not in str(caught.value)
    assert [(one.name, one.path) for one in downloads()] == [(str(place), address_dir(place, cache))]
    hub.requests.clear()
    hub.cuts.clear()
    assert download_file(place, cache, progress=False).read_bytes() == CONTENT
    assert ranges(hub) == [None, "bytes=100-" if etag == '"1"' else None]
    assert [headers.get("if-range") for _, _, headers in hub.requests] == [None, '"1"' if etag == '"1"' else None]


@pytest.mark.parametrize("compares_versions", [True, False])
def test_a_file_that_changes_during_its_download_is_downloaded_anew(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, compares_versions: bool
) -> None:
    hub.compares_versions = compares_versions
    place, changed = address(hub), CONTENT[:4] + CONTENT[4:][::-1]

    def change(seconds: float) -> None:
        hub.files["/a/m.gguf"] = changed, '"2"'

    monkeypatch.setattr(download, "sleep", change)
    hub.cuts = [len(CONTENT), 100]
    assert download_file(place, cache, progress=False).read_bytes() == changed
    assert ranges(hub)[2] == "bytes=100-"
    hub.files["/a/m.gguf"] = CONTENT, '"3"'
    assert download_file(place, cache, progress=False).read_bytes() == CONTENT


def test_a_digest_that_the_server_names_is_checked(hub: FakeHub, cache: Path) -> None:
    place = address(hub)
    redirect = {"Location": "/a/m.gguf", "X-Linked-Etag": f'"{sha256(b"other")}"'}
    hub.faults = [("/x/m.gguf", 302, redirect)] * 2
    with pytest.raises(ModelNotFound, match="its digest differs"):
        download_file(FileAddress(place.url.replace("/a/", "/x/"), "m.gguf"), cache, progress=False)


def test_all_parts_are_downloaded(hub: FakeHub, cache: Path) -> None:
    first, second = (address(hub, f"/a/m-0000{part}-of-00002.gguf", CONTENT + bytes([part])) for part in (1, 2))
    found = download_file(second, cache, progress=False)
    assert found.name == first.name
    assert {path.name: path.read_bytes()[-1] for path in found.parent.glob("*.gguf")} == {first.name: 1, second.name: 2}
    assert "key=secret" in second.url


def test_what_a_server_answers_is_passed_on(hub: FakeHub, cache: Path) -> None:
    for path, headers, reason in (
        ("/a/none.gguf", {}, r"^http://.*/a/none.gguf is answered with 404 Not Found$"),
        ("/a/m.gguf", {"Transfer-Encoding": "chunked", "Content-Length": ""}, "does not say how large the file is"),
        ("/a/m.gguf", {"Content-Length": "1" * 5000}, "does not say how large the file is"),
    ):
        if headers:
            hub.faults = [("m.gguf", 200, headers)]
        with pytest.raises(ModelNotFound, match=reason):
            download_file(FileAddress(f"{hub.content_url}{path}", path[3:]), cache, progress=False)
    assert not list(cache.rglob("*.gguf"))


def test_the_model_of_an_address_loads(hub: FakeHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_of(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    place = address(hub, "/a/tiny.gguf", (tmp_path / "tiny.gguf").read_bytes())
    with pytest.raises(ModelNotFound, match=r"/a/tiny.gguf is not downloaded: 'chairlift pull http://.*/a/tiny.gguf'") as caught:
        locate(place.url, download=False)
    assert "secret" not in str(caught.value)
    found = locate(place.url, progress=False)
    assert (found / LINK).resolve().name == "tiny.gguf"
    assert json.loads((found / "config.json").read_text())["model_type"] == "qwen2"
    with LLM(place.url) as llm:
        assert "secret" not in repr(llm.info)
    hub.files.clear()
    assert locate(place.url, progress=False) == found
