from pathlib import Path

import pytest
from gguf_files import default_file, write_safetensors

from chairlift.checkpoint.gguf import convert


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as this very code converts it, whatever the cache holds; its weights also in model.safetensors."""
    out = tmp_path_factory.mktemp("models") / "default"
    convert(default_file(), out)
    write_safetensors(out)
    return out
