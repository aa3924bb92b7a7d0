from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, fake_hub
from gguf_files import default_file, write_safetensors

from chairlift.checkpoint import download
from chairlift.checkpoint.gguf import convert


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as this very code converts it, whatever the cache holds; its weights also in model.safetensors."""
    out = tmp_path_factory.mktemp("models") / "default"
    convert(default_file(), out)
    write_safetensors(out)
    return out


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, without what the machine's user has."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub on this machine, which the environment names."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between requests, which take no time."""
    pauses: list[float] = []
    monkeypatch.setattr(download, "sleep", pauses.append)
    return pauses
