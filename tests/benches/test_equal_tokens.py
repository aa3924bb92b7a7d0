"""Rust, torch and the Triton kernels give the default model's greedy tokens."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("model_dir")]


def test_tokens_are_equal_from_rust_torch_and_the_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not made for this platform")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benches"))
    import equal_tokens

    from chairlift.config import DEFAULT_MODEL

    prompts = equal_tokens.PROMPTS[:1]
    found = {way: equal_tokens.tokens(DEFAULT_MODEL, way, prompts, 3) for way in equal_tokens.WAYS}
    assert [len(ids) for ids in found["rust"]] == [3]
    assert found["rust"] == found["torch"] == found["kernels"]
