"""The table of architectures in the documentation, and that each of them is compared with transformers."""

import importlib.util
from pathlib import Path

from gguf_files import MIXTURES, TINY
from tiny_models import FAMILIES

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
    assert {f"{name}ForCausalLM" for name, _ in FAMILIES.values()} == ARCHITECTURES.keys()
    assert {MIXTURES.get(kind, kind).removesuffix("_text") for kind, _ in TINY} == GGUF.keys()
