import errno
import os
import pwd
import re
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from fake_hub import FakeHub
from gguf import GGUFWriter
from gguf_files import gguf_of, split_gguf_of, tiny_model

from chairlift.checkpoint.cache import LINK, hub_dir
from chairlift.checkpoint.locate import cache_dir, locate, public_name
from chairlift.checkpoint.ollama_store import ollama_models
from chairlift.checkpoint.safetensors_file import SafetensorsFile
from chairlift.checkpoint.weight_files import info_before_load
from chairlift.config import DEFAULT_MODEL
from chairlift.errors import ChairliftError, ModelNotFound, UnsupportedModel
from chairlift.tokenizer import Tokenizer


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHAIRLIFT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "chairlift"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/chairlift")
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", "~/c")
    assert cache_dir() == tmp_path / "c"


def test_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHAIRLIFT_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> NoReturn:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_dir() == Path("/.cache/chairlift")
    assert hub_dir() == Path("/.cache/huggingface/hub")
    assert isinstance(ollama_models(), list)


def test_the_default_model_is_complete(model_dir: Path) -> None:
    names = {path.name for path in model_dir.iterdir()}
    config = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == {*config, LINK}
    assert locate(DEFAULT_MODEL) == model_dir


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert locate(str(tmp_path / "m")) == tmp_path / "m"
    monkeypatch.chdir(tmp_path)
    assert locate("m") == tmp_path / "m"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/m") == tmp_path / "m"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "m.gguf", "Q8_0/m.gguf"])
def test_a_fifo_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    files = () if name.endswith("gguf") else {"config.json", "model.safetensors"} - {name}
    for other in files:
        (tmp_path / other).write_text("{}")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UnsupportedModel, match=f"{name} is no regular file"):
        locate(str(tmp_path))
    with pytest.raises(ModelNotFound):
        locate(str(tmp_path / name))
    if files:
        with pytest.raises(ModelNotFound):
            locate(str(tmp_path / "model.safetensors"))
    assert not info_before_load(tmp_path).architecture


def test_a_file_is_converted_once(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), path)
    first = locate(str(path))
    assert first.parent == cache / "gguf"
    assert (first / LINK).resolve() == path
    assert capsys.readouterr().err == "Reading the tokenizer of tiny.gguf\n"
    assert locate(str(path)) == first
    assert capsys.readouterr().err == ""


def test_a_link_that_cannot_be_followed_is_made_again(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), path)
    link = locate(str(path), progress=False) / LINK
    link.unlink()
    link.symlink_to("x" * 300)  # an error of lstat, as for a link into the home directory of another user
    assert (locate(str(path), progress=False) / LINK).resolve() == path


def test_a_file_that_changed_is_converted_again(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), path)
    first = locate(str(path), progress=False)
    os.utime(path, ns=(0, 0))
    second = locate(str(path), progress=False)
    (tmp_path / "tokenizer.json").write_bytes((second / "tokenizer.json").read_bytes())
    third = locate(str(path), progress=False)
    assert len({first, second, third}) == 3


def test_only_the_last_form_of_a_file_is_kept(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "other").mkdir()
    path, other = tmp_path / "tiny.gguf", tmp_path / "other" / "tiny.gguf"
    kept = []
    for file in (path, other):
        gguf_of(tiny_model("qwen2"), file)
        locate(str(file), progress=False)
        os.utime(file, ns=(0, 0))
        kept.append(locate(str(file), progress=False))
    assert sorted((cache / "gguf").iterdir()) == sorted(kept)


def test_forms_of_other_versions_stay_since_a_server_may_use_them(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), path)
    monkeypatch.setattr("chairlift.checkpoint.pull.pull_default", lambda *_: path)
    found = set()
    for layout in (7, 8, 7):
        monkeypatch.setattr("chairlift.checkpoint.locate._LAYOUT", layout)
        found |= {locate(model, progress=False) for model in (str(path), DEFAULT_MODEL)}
    assert len(found) == 4
    assert set((cache / "gguf").iterdir()) == found


def test_nothing_of_the_weights_is_written(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), path)
    found = locate(str(path), progress=False)
    assert sum(file.lstat().st_size for file in found.iterdir()) < path.stat().st_size / 2
    assert not list(found.glob("*.safetensors"))


def test_the_name_of_a_file_may_be_as_long_as_the_disk_allows(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / ("m\u00fc" * 83 + ".gguf")
    gguf_of(tiny_model("qwen2"), path)
    found = locate(str(path), progress=False)
    assert (found / LINK).resolve() == path
    assert found.name.startswith("m\u00fc" * 33)


def test_a_file_that_was_moved_away_and_back_is_linked_again(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), path)
    found = locate(str(path), progress=False)
    path.rename(tmp_path / "away")
    with pytest.raises(ModelNotFound, match="there is no model"):
        locate(str(path), progress=False)
    (tmp_path / "away").rename(path)
    assert locate(str(path), progress=False) == found


def test_the_model_among_the_gguf_files_of_a_directory(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "m"
    place.mkdir()
    for name in ("a-Q8_0.gguf", "b-q4_k_m.GGUF", "a-F16.gguf"):
        gguf_of(tiny_model("qwen2"), place / name)
    for name in ("mmproj-F16.gguf", "imatrix.gguf", "mtp-a.gguf", "eagle3-a.gguf", "._b-q4_k_m.GGUF", "._a-Q8_0.gguf"):
        (place / name).write_bytes(b"GGUF")
    assert (locate(str(place)) / LINK).resolve().name == "b-q4_k_m.GGUF"
    assert f"Taking b-q4_k_m.GGUF of {place}, which also holds a-Q8_0.gguf, a-F16.gguf" in capsys.readouterr().err
    (place / "b-q4_k_m.GGUF").unlink()
    (place / "config.json").write_text("{}")  # some repositories of GGUF files have one
    assert (locate(str(place), progress=False) / LINK).resolve().name == "a-Q8_0.gguf"
    (place / "model.safetensors").write_bytes(b"")
    assert locate(str(place)) == place


@pytest.mark.parametrize(("architecture", "kind"), [("clip", None), ("clip", "mmproj"), ("qwen2", "adapter"), ("qwen2", "imatrix")])
def test_files_of_any_name_beside_the_model_are_known_by_their_content(
    tmp_path: Path, cache: Path, architecture: str, kind: str | None
) -> None:
    place = tmp_path / "m"
    place.mkdir()
    gguf_of(tiny_model("qwen2"), place / "z.gguf")
    writer = GGUFWriter(place / "a-Q4_K_M.gguf", architecture)
    if kind:
        writer.add_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert (locate(str(place), progress=False) / LINK).resolve().name == "z.gguf"
    (place / "z.gguf").unlink()
    reason = f"its general.type is '{kind}'" if kind else "architecture 'clip'"
    with pytest.raises(UnsupportedModel, match=rf"a-Q4_K_M\.gguf holds .*{reason}"):
        locate(str(place), progress=False)


def test_the_model_may_lie_in_a_folder_of_its_type(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("Q4_K_M", "Q8_0"):
        (tmp_path / "m" / name).mkdir(parents=True)
        gguf_of(tiny_model("qwen2"), tmp_path / "m" / name / f"a-{name}.gguf")
    assert (locate(str(tmp_path / "m")) / LINK).resolve().name == "a-Q4_K_M.gguf"
    assert f"Taking Q4_K_M/a-Q4_K_M.gguf of {tmp_path / 'm'}, which also holds Q8_0/a-Q8_0.gguf" in capsys.readouterr().err


def test_a_file_may_have_any_name(tmp_path: Path, cache: Path) -> None:
    gguf_of(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    (tmp_path / "tiny.gguf").rename(tmp_path / "blob")
    assert (locate(str(tmp_path / "blob"), progress=False) / LINK).resolve() == tmp_path / "blob"


@pytest.mark.parametrize("name", ["tiny.gguf", ""])
def test_a_tokenizer_beside_a_link_to_the_file_is_taken(tmp_path: Path, cache: Path, model_dir: Path, name: str) -> None:
    """A snapshot in the hub's cache holds links to files of other names elsewhere."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    gguf_of(tiny_model("qwen2"), blobs / "tiny.gguf", tokenizer="unheard-of")
    (blobs / "tiny.gguf").rename(blobs / "aaaa")
    (blobs / "bbbb").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (snapshot / "tiny.gguf").symlink_to("../blobs/aaaa")
    (snapshot / "tokenizer.json").symlink_to("../blobs/bbbb")
    assert Tokenizer(locate(str(snapshot / name), progress=False)).vocab_size == 49152


def test_any_part_of_a_split_file_stands_for_the_model(tmp_path: Path, cache: Path) -> None:
    split_gguf_of(tiny_model("qwen2"), tmp_path / "m" / "tiny.gguf", 6)
    parts = sorted((tmp_path / "m").iterdir())
    assert len(parts) > 2
    assert len({locate(str(path), progress=False) for path in (*parts, tmp_path / "m")}) == 1
    assert public_name(str(parts[1])) == "tiny"
    parts[0].rename(tmp_path / "away")
    with pytest.raises(UnsupportedModel, match=f"{parts[0].name} cannot be read"):
        locate(str(tmp_path / "m"), progress=False)
    (tmp_path / "m" / "odd-00000-of-00000.gguf").write_bytes((tmp_path / "away").read_bytes())  # this is not a name of a part


def test_a_file_of_a_directory_stands_for_it(tmp_path: Path) -> None:
    model = tmp_path / "org-model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "adapter_model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    for name in ("config.json", "model.safetensors"):
        assert locate(str(model / name)) == model
        assert public_name(str(model / name)) == "org-model"
    for name in ("adapter_model.safetensors", "tokenizer.json"):
        with pytest.raises(ModelNotFound, match=f"{name} is a file but not a GGUF one"):
            locate(str(model / name))
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert locate(str(model / "model.safetensors.index.json")) == model


def test_a_file_may_be_named_by_its_address(tmp_path: Path, cache: Path) -> None:
    model = tmp_path / "a model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    gguf_of(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    for start in ("file://", "file://localhost", "file:", "FILE://"):
        assert locate(f"{start}{tmp_path}/a%20model") == model
        assert locate(f"{start}{tmp_path}/tiny.gguf", progress=False) == locate(str(tmp_path / "tiny.gguf"), progress=False)
    assert public_name(f"file://{tmp_path}/tiny.gguf") == "tiny"
    for other in (f"file://elsewhere{tmp_path}/tiny.gguf", "file://tiny.gguf"):
        with pytest.raises(ModelNotFound, match="there is no model"):
            locate(other)


def test_an_adapter_beside_the_weights_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    locate(str(tmp_path))
    assert capsys.readouterr().err == ""
    (tmp_path / "adapter_config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path
    assert "also holds a LoRA adapter, which is used only with --lora-modules" in capsys.readouterr().err


def test_a_repository_of_the_hubs_cache_stands_for_its_snapshot(tmp_path: Path, cache: Path, hub: FakeHub) -> None:
    hub.add("org/model", {"config.json": b"{}", "model.safetensors": b"1"})
    gguf_of(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    hub.add("org/tiny-GGUF", {"tiny-Q8_0.gguf": (tmp_path / "tiny.gguf").read_bytes()})
    snapshot, converted = locate("org/model", progress=False), locate("org/tiny-GGUF", progress=False)
    folder = snapshot.parents[1]
    assert folder.name == "models--org--model"
    assert locate(str(folder), progress=False) == snapshot
    assert locate(str(folder.with_name("models--org--tiny-GGUF")), progress=False) == converted
    assert public_name(str(folder)) == "org/model"


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 123456\n"
    for name in ("tiny.gguf", "model.safetensors", "tokenizer.json", "tokenizer.model", "tekken.json"):
        (tmp_path / name).write_text(pointer)
    reads = [lambda: locate(str(tmp_path / "tiny.gguf")), lambda: locate(str(tmp_path), progress=False)]
    reads += [partial(SafetensorsFile, tmp_path / "model.safetensors")]
    reads += [partial(Tokenizer, tmp_path, tmp_path / name) for name in ("tokenizer.json", "tokenizer.model", "tekken.json")]
    for read in reads:
        with pytest.raises(ChairliftError, match=r"it is a pointer of Git LFS, run 'git lfs pull' in its directory$"):
            read()


def test_a_bad_file_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(UnsupportedModel, match="damaged or incomplete"):
        locate(str(tmp_path / "bad.gguf"), progress=False)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty", r"empty has no config\.json and no GGUF file; a model's directory holds config\.json, tokenizer\.json"),
        ("weights.bin", r"weights\.bin is a file but not a GGUF one"),
        ("missing", "there is no model '.*missing' here; name a directory"),
        ("missing.gguf", "there is no model"),
    ],
)
def test_what_is_no_model(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=reason):
        locate(str(tmp_path / name))


def test_a_path_that_is_mistyped_may_have_the_form_of_a_name(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/mymodel", "model/lama.gguf", "models/a/lama.gguf"):
        for download in (True, False):
            with pytest.raises(ModelNotFound, match=rf"; there is no file or directory {name} here either$"):
                locate(name, progress=False, download=download)
    with pytest.raises(ModelNotFound, match=r"if it is private, set HF_TOKEN$"):
        locate("model/mymodel", progress=False)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"holds a LoRA adapter: serve the model that it was trained for with --lora-modules NAME="):
        locate(str(tmp_path))


def test_a_cache_directory_is_for_all_models(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), path)
    models = tmp_path / "elsewhere"
    assert locate(str(path), directory=str(models), progress=False).parent == models / "gguf"
    hub.add("org/model", {"config.json": b"{}"})
    places = [locate("org/model", directory=str(models), progress=False), locate("org/model", progress=False)]
    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR")
    places.append(locate("org/model", progress=False))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "own"))
    places.append(locate("org/model", progress=False))
    caches = [models / "hub", tmp_path / "cache" / "hub", tmp_path / "huggingface" / "hub", tmp_path / "own"]
    assert [place.parents[2] for place in places] == caches


def test_a_full_disk_is_named(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    models, path = tmp_path / "elsewhere", tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), path)
    hub.add("org/model", {"config.json": b"{}"})
    write = Path.write_text
    monkeypatch.setattr(
        Path, "write_text", lambda path, *text, **how: (full if path.name == "tokenizer.json" else write)(path, *text, **how)
    )
    monkeypatch.setattr("chairlift.checkpoint.download._append", full)
    for model, place in (str(path), models / "gguf"), ("org/model", models / "hub"):
        with pytest.raises(ChairliftError, match=f"not enough disk space to write to {place} .* name another directory with --cache-dir"):
            locate(model, directory=str(models), progress=False)


def test_clients_see_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a local model they see the last part of its path; other names are no paths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    snapshot = Path("hub/models--org--name/snapshots/0a1b2c")
    for directory in (Path("models/tiny"), snapshot):
        directory.mkdir(parents=True)
    Path("models/tiny-Q4_0.gguf").touch()
    for model in ("models/tiny", "models/tiny/", "./models/tiny", "~/models/tiny", str(tmp_path / "models/tiny"), "models/../models/tiny"):
        assert public_name(model) == "tiny"
    assert public_name("models/tiny-Q4_0.gguf") == "tiny-Q4_0"
    assert public_name(str(snapshot)) == "org/name"
    for model in ("org/name", DEFAULT_MODEL, "models/nothing"):
        assert public_name(model) == model
    assert public_name("/") == "/"


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("llama3", "meta-llama/Llama-3.2-1B-Instruct or meta-llama/Llama-3.2-3B-Instruct or meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("lama3.2", "meta-llama/Llama-3.2-1B-Instruct"),
        ("Mistral", "mistralai/Mistral-7B-Instruct-v0.3"),
    ],
)
def test_a_familiar_name_gets_suggestions(name, suggested):
    with pytest.raises(ModelNotFound, match=re.escape(f"; did you mean {suggested}?") + "$"):
        locate(name)
    for strange in ("zzz", "模型"):
        with pytest.raises(ModelNotFound, match=r"smollm2-135m-instruct$"):
            locate(strange)
