"""Models of the Hugging Face hub are downloaded whole and right, or not at all."""

import errno
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import IO

import pytest
from fake_hub import FakeHub, FakeRepository, sha256
from gguf_files import gguf_of, split_gguf_of, tiny_model
from huggingface_hub import scan_cache_dir, snapshot_download

from chairlift.checkpoint import download
from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.hub_cache import Repository
from chairlift.checkpoint.hub_download import download_hub_model
from chairlift.checkpoint.hub_model import find_hub_model
from chairlift.checkpoint.locate import locate, public_name
from chairlift.checkpoint.model_name import HubName
from chairlift.errors import ChairliftError, ModelNotFound

LARGE = b"GGUF" + bytes(range(256)) * 8
NAME = HubName("org/repo", "Q4_K_M")


def gguf(kind: str) -> bytes:
    return LARGE + kind.encode()


@pytest.fixture
def repository(hub: FakeHub) -> FakeRepository:
    """A repository of GGUF files."""
    kinds = "BF16", "F16", "Q2_K", "Q4_K_M", "Q8_0"
    files = {f"m-{kind}.gguf": gguf(kind) for kind in kinds}
    others = {name: gguf("other") for name in ("mmproj-Q4_K_M.gguf", "m-imatrix.gguf", "mtp-m-Q4_K_M.gguf", "eagle3-Q4_K_M.gguf")}
    return hub.add("org/repo", {**files, **others, "config.json": b"{}", "README.md": b"text"})


def pull(hub: FakeHub, cache: Path, name: HubName = NAME) -> Path:
    return download_hub_model(name, cache / "hub", progress=False)


def left(cache: Path) -> list[str]:
    """The files in the hub's cache that are no links."""
    return sorted(path.name for path in (cache / "hub").rglob("*") if path.is_file() and not path.is_symlink())


@pytest.mark.parametrize(
    ("tag", "file"),
    [(None, "m-Q4_K_M.gguf"), ("q8_0", "m-Q8_0.gguf"), ("F16", "m-F16.gguf"), ("bf16", "m-BF16.gguf"), ("2_K", "m-Q2_K.gguf")],
)
def test_the_file_of_a_tag(hub: FakeHub, cache: Path, repository: FakeRepository, tag: str | None, file: str) -> None:
    found = pull(hub, cache, HubName("org/repo", tag))
    assert (found.name, found.read_bytes()) == (file, repository.files[file])
    assert hub.downloads() == [file]


def test_the_files_of_other_forms_of_names(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    files = {"UD/b-UD-Q8_0-00001-of-00002.gguf": gguf("1"), "UD/b-UD-Q8_0-00002-of-00002.gguf": gguf("2"), "UD/tokenizer.json": b"{}"}
    hub.add("org/parts", {**files, "z-Q2_K.GGUF": gguf("z")}).commit = "d" * 40
    found = pull(hub, cache, HubName("org/parts"))
    assert found.name == "b-UD-Q8_0-00001-of-00002.gguf"
    assert sorted(path.name for path in found.parent.iterdir()) == sorted(Path(name).name for name in files)
    assert pull(hub, cache, HubName("org/parts", "Q2_K")).name == "z-Q2_K.GGUF"
    assert pull(hub, cache, HubName("org/parts", file="UD/b-UD-Q8_0-00002-of-00002.gguf")) == found
    hub.repositories["org/parts"].files.pop("UD/b-UD-Q8_0-00002-of-00002.gguf")
    with pytest.raises(ModelNotFound, match=r"org/parts has no file UD/b-UD-Q8_0-00002-of-00002.gguf, which belongs to the model"):
        pull(hub, cache, HubName("org/parts"))


def test_the_cache_is_that_of_the_hubs_programs(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    found = pull(hub, cache)
    [info] = scan_cache_dir(cache / "hub").repos
    assert (info.repo_id, [revision.refs for revision in info.revisions]) == ("org/repo", [frozenset({"main"})])
    assert found == Path(snapshot_download("org/repo", cache_dir=cache / "hub", local_files_only=True)) / "m-Q4_K_M.gguf"
    assert found.resolve().name == sha256(gguf("Q4_K_M"))
    assert hub.requests[-1][2].get("range") is None


def test_safetensors_files_that_belong_to_the_model(hub: FakeHub, cache: Path) -> None:
    weights = {f"model-0000{part}-of-00002.safetensors": gguf(str(part)) for part in (1, 2)}
    index = {"weight_map": {str(part): name for part, name in enumerate(weights)}}
    wanted = {"config.json": b"{}", "tokenizer.model": b"x", "model.safetensors.index.json": json.dumps(index).encode(), **weights}
    others = {"consolidated.safetensors": LARGE, "model-other.safetensors": LARGE, "pytorch_model.bin": LARGE, "m-Q8_0.gguf": LARGE}
    hub.add("org/whole", {**wanted, **others, "run.py": b"import os", "merges.txt": b"z", "additional_chat_templates/rag.jinja": b"y"})
    found = pull(hub, cache, HubName("org/whole"))
    assert found == locate("org/whole", progress=False)
    files = {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()}
    assert files == {*wanted, "merges.txt", "additional_chat_templates/rag.jinja"}
    assert pull(hub, cache, HubName("org/whole", "Q8_0")).name == "m-Q8_0.gguf"


def test_dense_layers_of_sentence_transformers_belong_to_the_model(hub: FakeHub, cache: Path) -> None:
    modules = [{"type": f"sentence_transformers.models.{path[2:]}", "path": path} for path in ("0_Transformer", "1_Pooling", "2_Dense")]
    files = {"config.json": b"{}", "model.safetensors": LARGE, "2_Dense/config.json": b"{}", "2_Dense/model.safetensors": gguf("dense")}
    repository = hub.add("org/whole", {**files, "modules.json": json.dumps(modules).encode(), "onnx/model.safetensors": LARGE})
    found = pull(hub, cache, name := HubName("org/whole"))
    assert {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()} == {*files, "modules.json"}
    assert locate_here(name, cache) == found
    (found / "2_Dense/model.safetensors").unlink()  # as after a download by a program that took less
    assert locate_here(name, cache) is None
    repository.files["modules.json"] = json.dumps([{"type": "a.Dense", "path": "../other"}]).encode()
    with pytest.raises(ModelNotFound, match=r"org/whole has no file \.\./other/model\.safetensors, which belongs to the model"):
        pull(hub, cache, name)


def test_the_weights_of_a_model_with_the_index_of_another(hub: FakeHub, cache: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}).encode()
    hub.add("org/whole", {"config.json": b"{}", "model.safetensors": LARGE, "model.safetensors.index.json": index})
    found = pull(hub, cache, name := HubName("org/whole"))
    assert (found / "model.safetensors").read_bytes() == LARGE
    assert locate_here(name, cache) == found


def test_safetensors_files_in_folders_are_not_the_model(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    repository.files["lora/adapter_model.safetensors"] = LARGE
    assert pull(hub, cache, HubName("org/repo")).name == "m-Q4_K_M.gguf"


def test_the_list_of_files_may_have_pages(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    repository.entries.append({"type": "directory", "path": "empty", "oid": "0" * 40, "size": 0})
    hub.page = 2
    assert pull(hub, cache, HubName("org/repo", "Q8_0")).is_file()


@pytest.mark.parametrize("revision", ["v1", "c" * 40, "c" * 7, "refs/pr/9", "../../main", "/x"])
def test_revisions(hub: FakeHub, cache: Path, repository: FakeRepository, revision: str) -> None:
    name = HubName("org/repo", "Q8_0", revision=revision)
    if revision.startswith(("refs", ".", "/")):
        with pytest.raises(ModelNotFound, match="has no revision 'refs/pr/9'" if revision.startswith("refs") else "no name of a branch"):
            pull(hub, cache, name)
        assert left(cache) == []
    else:
        assert pull(hub, cache, name).parent.name == "c" * 40
        assert locate_here(name, cache) is not None


def locate_here(name: HubName, cache: Path) -> Path | None:
    return find_hub_model(name, cache / "hub")


def test_a_mirror_without_a_list_of_branches(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    hub.faults = [("refs", 404, {})]
    assert pull(hub, cache).is_file()
    hub.faults = [("refs", 404, {}), ("revision", 404, {})]
    with pytest.raises(ModelNotFound, match=r"the Hugging Face hub has no model org/repo; if it is private, set HF_TOKEN$"):
        pull(hub, cache)


def test_a_file_is_downloaded_once(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    first = pull(hub, cache)
    repository.commit = "d" * 40
    second = pull(hub, cache)
    assert hub.downloads() == ["m-Q4_K_M.gguf"]
    assert first != second
    assert first.resolve() == second.resolve()


def test_a_download_that_breaks_goes_on(hub: FakeHub, cache: Path, repository: FakeRepository, pauses: list[float]) -> None:
    hub.cuts = [100, 500, 0, *[1] * 7]
    assert pull(hub, cache).read_bytes() == gguf("Q4_K_M")
    ranges = [headers.get("range") for server, _, headers in hub.requests if server == "content"]
    assert ranges == [None, "bytes=100-", *(f"bytes={start}-" for start in (600, *range(600, 608)))]


def test_the_next_call_goes_on_with_a_download(hub: FakeHub, cache: Path, repository: FakeRepository, pauses: list[float]) -> None:
    hub.cuts = [100] + [0] * 5
    with pytest.raises(ModelNotFound, match=r"the Hugging Face hub cannot be reached for org/repo \(the connection ended after 100 of "):
        pull(hub, cache)
    assert left(cache) == [f"{sha256(gguf('Q4_K_M'))}.incomplete"]
    assert locate_here(NAME, cache) is None
    assert pull(hub, cache).read_bytes() == gguf("Q4_K_M")
    assert hub.requests[-1][2]["range"] == "bytes=100-"
    assert not any(name.endswith(".incomplete") for name in left(cache))


def test_a_server_that_does_not_resume_sends_all_of_it_again(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    hub.cuts, hub.resumes = [100], False
    assert pull(hub, cache).read_bytes() == gguf("Q4_K_M")


@pytest.mark.parametrize("begun", [b"", b"something else"])
def test_a_file_with_another_digest_is_refused(hub: FakeHub, cache: Path, repository: FakeRepository, begun: bytes) -> None:
    hub.sent["m-Q4_K_M.gguf"] = gguf("Q4_K_m")
    blob = Repository(cache / "hub", "org/repo").blob(sha256(gguf("Q4_K_M")))
    blob.parent.mkdir(parents=True)
    blob.with_name(f"{blob.name}.incomplete").write_bytes(begun)
    with pytest.raises(ModelNotFound, match=r"m-Q4_K_M.gguf of org/repo as downloaded is not the file that the hub lists"):
        pull(hub, cache)
    assert left(cache) == []
    assert len(hub.downloads()) == 1 + bool(begun)  # what another process had begun may have been wrong
    hub.sent.clear()
    assert pull(hub, cache).read_bytes() == gguf("Q4_K_M")


def test_a_small_file_with_another_digest_is_refused(hub: FakeHub, cache: Path) -> None:
    hub.add("org/whole", {"config.json": b"{}", "model.safetensors": LARGE})
    hub.sent["config.json"] = b"[]"
    with pytest.raises(ModelNotFound, match=r"config.json of org/whole as downloaded is not the file that the hub lists"):
        pull(hub, cache, HubName("org/whole"))
    assert left(cache) == []


def test_a_redirect_that_names_another_file_is_refused(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    place = f"{hub.content_url}/other"
    hub.files["/other"] = gguf("Q4_K_M"), None
    hub.faults.append(("resolve", 302, {"Location": place, "X-Linked-Etag": f'"{sha256(b"other")}"'}))
    with pytest.raises(ModelNotFound, match="its digest differs"):
        pull(hub, cache)
    assert left(cache) == []


@pytest.mark.parametrize("size", [5, 10**6])
def test_a_file_of_another_size_is_refused(hub: FakeHub, cache: Path, repository: FakeRepository, size: int) -> None:
    entry = repository.entry("m-Q4_K_M.gguf")
    repository.listed["m-Q4_K_M.gguf"] = {"size": size, "lfs": {**entry["lfs"], "size": size}}
    with pytest.raises(ModelNotFound, match=rf"cannot be downloaded: .*m-Q4_K_M.gguf has 2,058 bytes, not {size:,}") as caught:
        pull(hub, cache)
    assert "secret" not in str(caught.value)
    assert left(cache) == []


@pytest.mark.parametrize(
    "path", ["../x.gguf", "/x.gguf", "a/../../x.gguf", "a\\..\\x.gguf", "C:x.gguf", "a//x.gguf", "a/./x", "x\0.gguf", ""]
)
def test_a_path_that_leaves_the_folder_is_refused(hub: FakeHub, cache: Path, repository: FakeRepository, path: str) -> None:
    repository.entries.append({"type": "file", "path": path, "size": 1, "oid": "0" * 40})
    with pytest.raises(ModelNotFound, match=r"org/repo lists the file .*, which is outside of the model's folder: it is not downloaded"):
        pull(hub, cache)
    assert left(cache) == []


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "a", "size": 1, "oid": "../../x"},
        {"path": "a", "size": -1, "oid": "0" * 40},
        {"path": "a", "oid": "0" * 40},
        {"path": "a", "size": 1, "oid": "0" * 40, "lfs": {"oid": "0" * 63, "size": 1}},
        {"path": "a", "size": 1, "oid": "0" * 40, "lfs": 5},
        5,
        None,
    ],
)
def test_an_entry_of_another_form_is_refused(hub: FakeHub, cache: Path, repository: FakeRepository, entry: object) -> None:
    repository.entries.append(entry)
    with pytest.raises(ModelNotFound, match="does not answer as the Hugging Face hub does: its list of files has"):
        pull(hub, cache)


def test_a_commit_that_is_a_path_is_refused(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    repository.commit = "../../x"
    with pytest.raises(ModelNotFound, match=r"its commit of main is '../../x'"):
        pull(hub, cache)


def test_another_server_at_the_hubs_address_is_named(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.content_url)
    for page in (b"<html>", b"[" * 10**5):
        hub.files["/api/models/org/repo/refs"] = page, None
        with pytest.raises(ModelNotFound, match=f"{hub.content_url} does not answer as the Hugging Face hub does: .* JSON"):
            pull(hub, cache)


GATED = r"org/repo is gated: accept its terms at http://.*/org/repo with your account"


@pytest.mark.parametrize(
    ("settings", "token", "reason"),
    [
        ({"gated": True}, None, rf"{GATED}, and set HF_TOKEN to a token of http://.*/settings/tokens$"),
        ({"gated": True}, "stranger", rf"{GATED}$"),
        ({"private": True}, None, "the Hugging Face hub has no model org/repo; if it is private, set HF_TOKEN$"),
        ({"private": True}, "stranger", "the Hugging Face hub has no model org/repo; if it is private, your token may not read it$"),
        ({}, "expired", "the Hugging Face hub refuses the token: set HF_TOKEN to a valid one"),
        ({}, "two words", "the token in HF_TOKEN has characters that no token has"),
    ],
)
def test_what_the_hub_refuses(
    hub: FakeHub,
    cache: Path,
    repository: FakeRepository,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, bool],
    token: str | None,
    reason: str,
) -> None:
    for name, value in settings.items():
        setattr(repository, name, value)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelNotFound, match=reason) as caught:
        pull(hub, cache)
    assert "\n" not in str(caught.value)
    assert token is None or token not in str(caught.value).replace("your token", "")
    assert left(cache) == []


def test_what_the_hub_does_not_have(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    hub.add("org/other", {"pytorch_model.bin": LARGE})
    hub.add("org/empty", {})
    for name, reason in (
        (HubName("org/repo", "Q5_K_M"), "org/repo has no GGUF file for Q5_K_M; it has Q4_K_M, Q8_0, BF16, F16, Q2_K$"),
        (HubName("org/repo", file="x.gguf"), "org/repo has no file x.gguf"),
        (HubName("org/other"), r"neither safetensors files with a config.json nor a GGUF file, but \.bin"),
        (HubName("org/empty"), "but no files"),
        (HubName("org/nothing"), "the Hugging Face hub has no model org/nothing"),
    ):
        with pytest.raises(ModelNotFound, match=reason):
            pull(hub, cache, name)


@pytest.mark.parametrize("place", ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME"])
def test_the_token_goes_to_the_hub_alone(
    hub: FakeHub, cache: Path, tmp_path: Path, repository: FakeRepository, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    repository.gated = repository.private = True
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(" member\n")
    values = {"HF_TOKEN": "member", "HF_TOKEN_PATH": str(tmp_path / "home" / "token"), "HF_HOME": str(tmp_path / "home")}
    monkeypatch.setenv(place, values[place])
    # A renamed repository: the hub redirects to itself.
    hub.faults.append(("resolve", 307, {"Location": f"/org/repo/resolve/{repository.commit}/m-Q4_K_M.gguf"}))
    assert pull(hub, cache).is_file()
    sent = {(server, headers.get("authorization")) for server, _, headers in hub.requests}
    assert sent == {("hub", "Bearer member"), ("content", None)}


def test_the_token_does_not_follow_a_list_of_files_to_another_server(
    hub: FakeHub, cache: Path, repository: FakeRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "member")
    hub.page, hub.next_page = 3, f"{hub.content_url}/more"
    hub.files["/more"] = json.dumps(repository.tree()[3:]).encode(), None
    assert pull(hub, cache).is_file()
    assert {headers.get("authorization") for server, _, headers in hub.requests if server == "content"} == {None}


def test_a_download_that_another_process_completed_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, blob = tmp_path / "blob.incomplete", tmp_path / "blob"
    path.write_bytes(b"complete")

    def locked(file: IO[bytes], operation: int) -> None:
        if not blob.exists():
            path.rename(blob)

    monkeypatch.setattr(download.fcntl, "flock", locked)
    with download.partial_file(path) as part:
        part.write(b"new")
    assert (path.read_bytes(), blob.read_bytes()) == (b"new", b"complete")


def test_no_redirect_leaves_an_encrypted_connection(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    hub.faults.append(("resolve", 302, {"Location": "ftp://127.0.0.1/x"}))
    with pytest.raises(ModelNotFound, match=r"cannot be downloaded: .* redirects to ftp://127.0.0.1/x, which is not encrypted"):
        pull(hub, cache)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Retry-After": "7"}, [7.0]),
        ({"RateLimit": '"resolvers";r=0;t=9'}, [9.0]),
        ({}, [1.0]),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, [0.0]),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_waited_for(
    hub: FakeHub, cache: Path, repository: FakeRepository, pauses: list[float], status: int, headers: dict[str, str], expected: list[float]
) -> None:
    hub.faults = [("refs", status, headers), ("resolve", status, headers)]
    assert pull(hub, cache).is_file()
    assert pauses == expected * 2


def test_a_hub_that_stays_busy_is_named(hub: FakeHub, cache: Path, repository: FakeRepository, pauses: list[float]) -> None:
    hub.faults = [("refs", 429, {"Retry-After": "3600"})]
    with pytest.raises(ModelNotFound, match=r"the Hugging Face hub allows no more requests now: try again in 3600 s, or set HF_TOKEN$"):
        pull(hub, cache)
    assert pauses == []
    hub.faults = [("tree", 502, {})] * 5
    with pytest.raises(ModelNotFound, match=r"the Hugging Face hub is out of order \(status 502\): try again later"):
        pull(hub, cache)
    assert pauses == [1.0, 2.0, 4.0, 8.0]


def test_a_copy_is_taken_where_the_hub_cannot_be_asked(
    hub: FakeHub,
    cache: Path,
    repository: FakeRepository,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    gguf_of(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    repository.files["m-Q4_K_M.gguf"] = (tmp_path / "tiny.gguf").read_bytes()
    with pytest.raises(ModelNotFound, match=r"org/repo:Q4_K_M is not downloaded: 'chairlift pull org/repo:Q4_K_M' downloads it"):
        locate("org/repo:Q4_K_M", download=False)
    assert hub.requests == []
    found = locate("hf.co/org/repo:Q4_K_M", progress=False)
    assert (found / LINK).resolve().read_bytes() == repository.files["m-Q4_K_M.gguf"]
    count = len(hub.requests)
    assert locate("org/repo:q4_k_m", download=False) == found
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert locate("org/repo") == found
    with pytest.raises(ModelNotFound, match="org/repo:Q8_0 is not downloaded: HF_HUB_OFFLINE allows no request"):
        locate("org/repo:Q8_0")
    assert len(hub.requests) == count
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    capsys.readouterr()
    assert locate("org/repo") == found
    assert "cannot be reached" in (err := capsys.readouterr().err)
    assert "taking the copy of org/repo that was downloaded earlier" in err
    with pytest.raises(ModelNotFound, match="cannot be reached"):
        locate("org/repo", update=True)


def test_an_earlier_commit_serves_until_a_newer_one_is_complete(
    hub: FakeHub, cache: Path, repository: FakeRepository, pauses: list[float]
) -> None:
    first = pull(hub, cache)
    repository.commit, repository.files["m-Q4_K_M.gguf"] = "d" * 40, gguf("new")
    hub.cuts = [100] + [0] * 5
    with pytest.raises(ModelNotFound):
        pull(hub, cache)
    assert locate_here(NAME, cache) == first
    assert pull(hub, cache).read_bytes() == gguf("new")
    pull(hub, cache, HubName("org/repo", "Q8_0"))
    assert locate_here(NAME, cache) != first


def test_nothing_is_written_for_a_model_that_is_complete(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    """The cache may be read-only, such as a volume of a container."""
    found = pull(hub, cache)
    folders = [path for path in (cache, *cache.rglob("*")) if path.is_dir()]
    for path in folders:
        os.utime(path, ns=(0, 0))
    assert pull(hub, cache) == found
    assert not any(path.stat().st_mtime_ns for path in folders)


def test_a_copy_is_taken_where_no_newer_one_can_be_written(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = hub.add("org/whole", {"config.json": b"{}", "model.safetensors": LARGE})
    found = locate("org/whole", progress=False)
    repository.commit, repository.files["model.safetensors"] = "d" * 40, gguf("new")

    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("chairlift.checkpoint.hub.partial_file", read_only)
    assert locate("org/whole") == found
    assert "(Read-only file system)" in (err := capsys.readouterr().err)
    assert "taking the copy of org/whole that was downloaded earlier" in err
    with pytest.raises(ChairliftError, match="cannot write to"):
        locate("org/whole", update=True)


def test_processes_that_pull_the_same_model_download_it_once(hub: FakeHub, cache: Path, repository: FakeRepository) -> None:
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=pull, args=(hub, cache)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0]
    assert pull(hub, cache).read_bytes() == gguf("Q4_K_M")
    assert hub.downloads() == ["m-Q4_K_M.gguf"]


def test_the_disk_is_checked_first(hub: FakeHub, cache: Path, repository: FakeRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = download.shutil.disk_usage(cache.parent)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ChairliftError, match="not enough disk space to write to"):
        pull(hub, cache)
    assert hub.downloads() == []


def test_names_of_models_of_the_hub(hub: FakeHub, cache: Path) -> None:
    assert public_name("org/repo:Q4_K_M") == "org/repo:Q4_K_M"
    assert public_name("https://huggingface.co/org/repo/resolve/main/a/m-Q8_0-00001-of-00002.gguf") == "m-Q8_0"
    assert public_name("https://huggingface.co/org/repo") == "org/repo"
    assert public_name("https://example.com/m-Q8_0.gguf?key=secret") == "m-Q8_0"


def test_a_split_model_of_the_hub_loads(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    split_gguf_of(tiny_model("qwen2"), tmp_path / "m" / "tiny-F32.gguf", 6)
    files = {f"F32/{path.name}": path.read_bytes() for path in (tmp_path / "m").iterdir()}
    hub.add("org/split", files)
    found = locate("org/split:F32", progress=False)
    assert os.readlink(found / LINK).endswith("snapshots/" + "c" * 40 + "/F32/" + min(path.name for path in (tmp_path / "m").iterdir()))


def test_threads_may_link_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, symlink_to = Repository(tmp_path, "org/repo"), Path.symlink_to

    def slowly(path: Path, target: str) -> None:
        """Makes the link, and lets another thread link the same file before this one goes on."""
        symlink_to(path, target)
        monkeypatch.setattr(Path, "symlink_to", symlink_to)
        other = threading.Thread(target=repository.link, args=("c" * 40, "config.json", "d" * 40))
        other.start()
        other.join()

    monkeypatch.setattr(Path, "symlink_to", slowly)
    repository.link("c" * 40, "config.json", "d" * 40)
    assert [path.name for path in repository.snapshot("c" * 40).iterdir()] == ["config.json"]


@pytest.mark.parametrize("page", ["", "http://[", "ftp://127.0.0.1/"])
def test_a_list_of_files_goes_on_over_http_alone(hub: FakeHub, tmp_path: Path, page: str) -> None:
    (tmp_path / "page").write_text("[]")
    hub.add("org/repo", {"a.json": b"{}", "b.json": b"{}"})
    hub.page, hub.next_page = 1, page or (tmp_path / "page").as_uri()
    with pytest.raises(ModelNotFound, match=r"its list of files goes on at '.*', which is no encrypted address"):
        locate("org/repo", progress=False)
    assert not list(tmp_path.rglob("*.json"))
