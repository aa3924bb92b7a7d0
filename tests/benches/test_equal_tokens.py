"""Rust, torch and the Triton kernels give the default model's greedy tokens."""

import equal_tokens
import pytest
from compile_gate import FULL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("model_dir")]

WAYS = ("rust", "torch", "kernels") if FULL else ("rust", "torch")
"""The interpreter of the kernels takes a minute of CPU time for three tokens: `make compile-gate` runs it."""


def test_tokens_are_equal_from_rust_torch_and_the_interpreted_kernels() -> None:
    if "kernels" in WAYS:
        pytest.importorskip("triton", reason="Triton is not made for this platform")
    from chairlift.config import DEFAULT_MODEL

    found = {way: equal_tokens.tokens(DEFAULT_MODEL, way, equal_tokens.PROMPTS[:1], 3) for way in WAYS}
    assert [len(ids) for ids in found["rust"]] == [3]
    assert all(tokens == found["rust"] for tokens in found.values())
