"""Hybrid models: their GGUF files, their states, and what is refused."""

from pathlib import Path

import gguf_recurrent
import numpy as np
import pytest
import torch
from cpu_logits import logits
from gguf_recurrent import NAMES

from chairlift.checkpoint.gguf import convert


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.slow
def test_a_file_gives_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    model = gguf_recurrent.rounded_model(kind)
    gguf_recurrent.write(model, tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "converted")
    with torch.inference_mode():
        expected = model(torch.arange(11)[None] * 7 % 300).logits[0].numpy()
    assert np.abs(logits(tmp_path / "converted") - expected).max() <= 1e-5 * np.abs(expected).max()
