"""`list`, `show` and `rm` know what was downloaded, under the names that `pull` takes."""

from pathlib import Path

import pytest
from fake_hub import FakeHub

from chairlift.checkpoint.cache import hub_dir
from chairlift.checkpoint.downloads import Owner, delete_model, downloads, find_download
from chairlift.checkpoint.file_download import download_file
from chairlift.checkpoint.hub_download import download_hub_model
from chairlift.checkpoint.model_name import FileAddress, HubName
from chairlift.errors import ModelNotFound

GGUF = b"GGUF" + bytes(200)


@pytest.fixture
def pulled(hub: FakeHub, cache: Path) -> FileAddress:
    """Pulls a model of each kind; returns an address."""
    parts = {f"b-Q8_0-0000{part}-of-00002.gguf": GGUF + bytes(part) for part in (1, 2)}
    hub.add("org/many", {"a-Q4_K_M.gguf": GGUF, **parts, "odd.gguf": GGUF + b"odd"})
    hub.add("org/one", {"one-F16.gguf": GGUF + b"one"})
    hub.add("org/whole", {"config.json": b"{}", "model.safetensors": GGUF})
    hub.files["/x/file.gguf"] = GGUF, '"1"'
    for name in (HubName("org/many", "Q4_K_M"), HubName("org/many", "Q8_0"), HubName("org/many", file="odd.gguf")):
        download_hub_model(name, hub_dir(), progress=False)
    for repo in ("org/one", "org/whole"):
        download_hub_model(HubName(repo), hub_dir(), progress=False)
    address = FileAddress(f"{hub.content_url}/x/file.gguf?key=secret", "file.gguf")
    download_file(address, cache, progress=False)
    return address


def test_the_names_of_all_models(pulled: FileAddress) -> None:
    found = {one.name: one for one in downloads()}
    assert {name: one.num_bytes for name, one in found.items() if name.startswith("org")} == {
        "org/many:Q4_K_M": 204,
        "org/many:Q8_0": 411,
        "org/many/odd.gguf": 207,
        "org/one:F16": 207,
        "org/whole": 206 + 40,  # the branch's commit is a file too
    }
    assert str(pulled) in found
    assert len(found) == 6
    for name in found:
        if name != str(pulled):
            assert find_download(name) == found[name]
    assert find_download(pulled.url) == found[str(pulled)]
    assert {one.owner for one in found.values()} == {Owner.CHAIRLIFT}


def test_a_download_that_brought_nothing_is_not_listed(hub: FakeHub, cache: Path) -> None:
    hub.add("org/gone", {"gone-F16.gguf": GGUF})
    hub.faults.append(("/resolve/", 404, {}))
    with pytest.raises(ModelNotFound):
        download_hub_model(HubName("org/gone"), hub_dir(), progress=False)
    with pytest.raises(ModelNotFound):
        download_file(FileAddress(f"{hub.content_url}/x/missing.gguf", "missing.gguf"), cache, progress=False)
    assert len(list(cache.rglob("*gone"))) == 1
    assert downloads() == []


def test_one_type_of_weights_is_deleted(pulled: FileAddress, cache: Path) -> None:
    blobs = cache / "hub" / "models--org--many" / "blobs"
    count = len(list(blobs.iterdir()))
    delete_model("hf.co/org/many:q8_0")
    assert len(list(blobs.iterdir())) == count - 2
    assert {one.name for one in downloads() if "many" in one.name} == {"org/many:Q4_K_M", "org/many/odd.gguf"}
    with pytest.raises(ModelNotFound, match="there is no downloaded model 'org/many:Q8_0'"):
        delete_model("org/many:Q8_0")
    delete_model("org/many")
    assert not blobs.parent.exists()
    delete_model("org/one:F16")
    assert not (cache / "hub" / "models--org--one").exists()
    delete_model("org/whole")
    delete_model(pulled.url)
    assert downloads() == []


def test_a_file_that_two_commits_have_is_deleted_from_both(hub: FakeHub, pulled: FileAddress, cache: Path) -> None:
    hub.repositories["org/many"].commit = "d" * 40
    download_hub_model(HubName("org/many", "Q4_K_M"), hub_dir(), progress=False)
    assert [one.name for one in downloads()].count("org/many:Q4_K_M") == 1
    delete_model("org/many:Q4_K_M")
    assert not list((cache / "hub").rglob("*Q4_K_M*"))


def test_content_that_another_file_has_too_stays(hub: FakeHub, cache: Path) -> None:
    hub.add("org/twins", {"a-Q4_K_M.gguf": GGUF, "a-Q8_0.gguf": GGUF})
    for tag in ("Q4_K_M", "Q8_0"):
        download_hub_model(HubName("org/twins", tag), hub_dir(), progress=False)
    delete_model("org/twins:Q4_K_M")
    assert [(one.name, one.num_bytes) for one in downloads()] == [("org/twins:Q8_0", len(GGUF))]


def test_the_hubs_own_cache_is_known_as_such(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    hub.add("org/one", {"one-F16.gguf": GGUF})
    download_hub_model(HubName("org/one"), hub_dir(), progress=False)
    (hub_dir() / "datasets--org--data").mkdir()
    assert [(one.name, one.owner) for one in downloads()] == [("org/one:F16", Owner.HUB)]
