from pathlib import Path

import pytest
from gguf_files import default_file

from chairlift.checkpoint.gguf import convert


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as this very code converts it, whatever the cache holds."""
    out = tmp_path_factory.mktemp("models") / "default"
    convert(default_file(), out)
    return out
