"""The table of architectures in the documentation, and that each of them is compared with transformers."""

import importlib.util
from pathlib import Path

import gguf_recurrent
from gguf_files import TINY, gguf_name
from tiny_models import FAMILIES, IMAGE_MODELS, class_name

from chairlift.architectures import ARCHITECTURES, GGUF

PAGE = Path(__file__).parent.parent / "docs" / "models_page.py"


def test_the_page_has_the_architectures_of_the_registry() -> None:
    spec = importlib.util.spec_from_file_location("models_page", PAGE)
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.page() == PAGE.with_name("models.md").read_text(), "run: python docs/models_page.py"


def test_every_architecture_has_a_tiny_model_that_is_compared_with_transformers() -> None:
    names = {wrapper for known in ARCHITECTURES.values() for wrapper in known.wrappers}
    compared = {class_name(family) for family, _ in FAMILIES.values()} | {name for name, *_ in IMAGE_MODELS.values()}
    assert compared == ARCHITECTURES.keys() | names
    with_images = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}  # which are others with keys for images
    assert {gguf_name(kind) for kind, _ in TINY} | set(gguf_recurrent.NAMES.values()) == GGUF.keys() - with_images
