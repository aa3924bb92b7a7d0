"""Models that Ollama has pulled are found under its names, and its files stay as they are."""

import json
from pathlib import Path

import pytest
from fake_hub import FakeHub
from gguf_files import CONTROLS, gguf_of, tiny_model
from ollama_files import write_ollama_model

from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.downloads import Owner, downloads, find_download
from chairlift.checkpoint.locate import locate, public_name
from chairlift.checkpoint.ollama_store import find_ollama_model, ollama_models
from chairlift.errors import ModelNotFound, UnsupportedModel
from chairlift.tokenizer import Tokenizer

LLAMA = "registry.ollama.ai/library/llama3.2/1b"


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    """A GGUF file whose second control token, 257, ends no answer."""
    gguf_of(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    return (tmp_path / "tiny.gguf").read_bytes()


@pytest.fixture
def store(cache: Path, tmp_path: Path) -> Path:
    """Ollama's store, which the environment names."""
    return tmp_path / "ollama"


def test_names_are_ollamas(store: Path) -> None:
    for name in (LLAMA, "registry.ollama.ai/library/llama3.2/latest", "registry.ollama.ai/user/own/v1", "hf.co/org/repo/Q4_K_M"):
        write_ollama_model(store, name, {"model": b"GGUF"})
    assert [model.name for model in ollama_models()] == ["hf.co/org/repo:Q4_K_M", "llama3.2:1b", "llama3.2:latest", "user/own:v1"]
    for text, name in (
        ("llama3.2", "llama3.2:latest"),
        ("Llama3.2:1B", "llama3.2:1b"),
        ("library/llama3.2:1b", "llama3.2:1b"),
        ("registry.ollama.ai/library/llama3.2", "llama3.2:latest"),
        ("ollama.com/library/llama3.2:1b", "llama3.2:1b"),
        ("https://ollama.com/library/llama3.2:1b", "llama3.2:1b"),
        ("https://ollama.com/user/own:v1", "user/own:v1"),
        ("ollama://user/own:v1", "user/own:v1"),
        ("user/own:v1", "user/own:v1"),
        ("huggingface.co/org/repo:q4_k_m", "hf.co/org/repo:Q4_K_M"),
    ):
        assert (found := find_ollama_model(text)) is not None
        assert found.name == name
    for text in ("llama3.2:3b", "own", "../llama3.2", "", "a/b/c/d", "llama3.2:1b/x", "https://example.com/llama3.2"):
        assert find_ollama_model(text) is None


def test_the_stores_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_ollama_model(tmp_path / ".ollama" / "models", LLAMA, {"model": b"GGUF"})
    assert "llama3.2:1b" in [model.name for model in ollama_models()]


def test_a_model_loads_from_the_store(
    store: Path, content: bytes, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    params = {"temperature": 0.25, "repeat_penalty": 1.5, "stop": [CONTROLS[1], "User:"], "num_ctx": 4096, "seed": 7}
    layers = {"model": content, "license": b"free", "params": json.dumps(params).encode()}
    write_ollama_model(store, LLAMA, layers)
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    found = locate("llama3.2:1b")
    assert (found / LINK).readlink().parent == store / "blobs"
    generation = json.loads((found / "generation_config.json").read_text())
    assert (generation["temperature"], generation["repetition_penalty"]) == (0.25, 1.5)
    tokenizer = Tokenizer(found)
    assert {256, 257} == set(tokenizer.eos_token_ids)
    assert "Not used of Ollama's llama3.2:1b: seed." in capsys.readouterr().err
    assert "['User:']" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    assert public_name("llama3.2:1b") == "llama3.2:1b"

    write_ollama_model(store, "registry.ollama.ai/library/other/latest", {"model": content, "template": b"{{ .Prompt }}", "system": b"Be."})
    other = locate("other")
    assert other != found
    assert set(Tokenizer(other).eos_token_ids) == {256}
    assert "its template, its system prompt" in capsys.readouterr().err
    assert locate("llama3.2:1b", progress=False) == found


def test_a_model_of_the_hub_that_ollama_has_is_taken(hub: FakeHub, tmp_path: Path, content: bytes) -> None:
    write_ollama_model(tmp_path / "ollama", "hf.co/org/repo/Q4_K_M", {"model": content})
    assert (locate("hf.co/org/repo:Q4_K_M", progress=False) / LINK).readlink().parent == tmp_path / "ollama" / "blobs"
    assert hub.requests == []
    hub.add("org/repo", {"m-Q4_K_M.gguf": content})
    pulled = locate("hf.co/org/repo:Q4_K_M", progress=False, update=True)
    assert (pulled / LINK).readlink().is_relative_to(tmp_path / "cache")
    assert locate("hf.co/org/repo:Q4_K_M", progress=False) == pulled


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ({"license": b"free"}, "has no GGUF file"),
        ({"model": b"GGUF", "adapter": b"x"}, "with a LoRA adapter"),
        ({"model": b"GGUF", "params": b"[]"}, "has parameters that cannot be read"),
        ({"model": b"GGUF\3\0\0\0"}, "damaged or incomplete"),
    ],
)
def test_models_that_cannot_be_served(store: Path, layers: dict[str, bytes], reason: str) -> None:
    write_ollama_model(store, LLAMA, layers)
    with pytest.raises(UnsupportedModel, match=reason):
        locate("llama3.2:1b", progress=False)


def test_a_file_that_ollama_has_not_completed_is_refused(store: Path, content: bytes) -> None:
    write_ollama_model(store, LLAMA, {"model": content})
    [blob] = (store / "blobs").iterdir()
    blob.write_bytes(content + b"0")
    with pytest.raises(UnsupportedModel, match=r"is missing or has another size: 'ollama pull llama3.2:1b' completes it"):
        locate("llama3.2:1b", progress=False)


@pytest.mark.parametrize("digest", [f"sha256:{'0' * 64}", "sha256:../../../secret", 5, None])
def test_a_manifest_names_no_other_file(store: Path, tmp_path: Path, digest: object) -> None:
    (tmp_path / "secret").write_bytes(b"GGUF")
    manifest = write_ollama_model(store, LLAMA, {"model": b"GGUF"})
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest, "size": 4}
    manifest.write_text(json.dumps({"layers": [layer]}))
    with pytest.raises(UnsupportedModel, match=r"is not complete|has a manifest that cannot be read"):
        locate("llama3.2:1b", progress=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"layers": 5}',
        '{"layers": [5]}',
        '{"layers": [{"mediaType": 5, "digest": "sha256:%s", "size": 4}]}' % ("0" * 64),
        "[" * 10**5,
    ],
)
def test_a_damaged_manifest_is_named(store: Path, text: str) -> None:
    manifest = write_ollama_model(store, LLAMA, {"model": b"GGUF"})
    manifest.write_text(text)
    with pytest.raises(UnsupportedModel, match=rf"Ollama's model llama3.2:1b has a manifest that cannot be read, {manifest}"):
        locate("llama3.2:1b", progress=False)
    assert [(one.name, one.num_bytes) for one in downloads()] == [("llama3.2:1b", 0)]


def test_ollamas_models_are_listed_and_not_deleted(store: Path) -> None:
    manifest = write_ollama_model(store, LLAMA, {"model": b"GGUF", "license": b"free"})
    [one] = downloads()
    assert (one.name, one.path, one.num_bytes, one.owner) == ("llama3.2:1b", manifest, 8, Owner.OLLAMA)
    with pytest.raises(ModelNotFound, match=r"llama3.2:1b belongs to Ollama: 'ollama rm llama3.2:1b' deletes it"):
        find_download("llama3.2:1b").delete()
    assert manifest.exists()
