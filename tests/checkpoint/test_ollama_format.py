"""Files that Ollama converted itself are read as those of llama.cpp's converter."""

from pathlib import Path
from typing import Any

import cpu_logits
import numpy as np
import pytest
from gguf_files import GEMMA, byte_level_metadata, gguf_of, tiny_model

from chairlift.checkpoint.gguf import convert, open_gguf
from chairlift.checkpoint.ollama_format import adapt

SETTINGS: dict[str, Any] = {**GEMMA, "num_hidden_layers": 7, "num_key_value_heads": 1}


def content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the tensors of a file."""
    found: list[Any] = []
    open_gguf(path).adapt(lambda metadata, tensors: found.extend((dict(metadata), dict(tensors))))
    return found[0], found[1]


@pytest.mark.parametrize("context", [128, 131072])
def test_gemma_3(tmp_path: Path, context: int) -> None:
    model = tiny_model("gemma3_text", **SETTINGS)
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0} if context > 128 else {}
    gguf_of(model, tmp_path / "usual.gguf", replaced={"gemma3.context_length": context, "gemma3.rope.freq_base_swa": 500.0, **scaling})
    tokens = byte_level_metadata("gpt-2")
    ollama = {"gemma3.context_length": context, "gemma3.rope.freq_base": None, "gemma3.attention.layer_norm_rms_epsilon": None}
    ollama |= {"gemma3.rope.global.freq_base": 1e6, "gemma3.rope.local.freq_base": 500.0, "gemma3.mm.tokens_per_image": 256}
    ollama |= {"gemma3.vision.block_count": 27, "tokenizer.ggml.tokens": [*tokens["tokenizer.ggml.tokens"], "<image_soft_token>"]}
    ollama |= {"tokenizer.ggml.token_type": [*tokens["tokenizer.ggml.token_type"], 3]}
    model.config.rms_norm_eps = 1e-6
    gguf_of(model, tmp_path / "ollama.gguf", replaced=ollama)
    gguf_of(model, tmp_path / "usual.gguf", replaced={"gemma3.context_length": context, "gemma3.rope.freq_base_swa": 500.0, **scaling})
    logits = []
    for name in ("usual", "ollama"):
        convert(tmp_path / f"{name}.gguf", tmp_path / name)
        logits.append(cpu_logits.logits(tmp_path / name))
    assert np.array_equal(*logits)
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "usual" / file).read_text() == (tmp_path / "ollama" / file).read_text()


def test_tensors_of_images_are_left_out(tmp_path: Path) -> None:
    gguf_of(tiny_model("gemma3_text", **SETTINGS), tmp_path / "usual.gguf")
    metadata, tensors = content(tmp_path / "usual.gguf")
    expected = dict(tensors)
    tensors |= {f"{part}.weight": tensors["output_norm.weight"] for part in ("v.patch_embedding", "mm.mm_input_projection")}
    adapt(metadata, tensors)
    assert tensors == expected


def test_gpt_oss(tmp_path: Path) -> None:
    settings = {"num_local_experts": 11, "num_experts_per_tok": 3, "sliding_window": 5}
    gguf_of(tiny_model("gpt_oss", **settings), tmp_path / "usual.gguf")
    expected_metadata, expected = content(tmp_path / "usual.gguf")
    expected_metadata["gpt-oss.expert_feed_forward_length"] = 96
    metadata = {key.replace("gpt-oss.", "gptoss."): value for key, value in expected_metadata.items()}
    metadata |= {"general.architecture": "gptoss"}
    del metadata["gptoss.expert_feed_forward_length"]
    tensors = {
        name.replace(".attn_output.", ".attn_out.").replace("sinks.weight", "sinks").replace(".post_attention_norm.", ".ffn_norm."): entry
        for name, entry in expected.items()
    }
    assert not any(".post_attention_norm." in name or ".attn_output." in name or name.endswith("sinks.weight") for name in tensors)
    adapt(metadata, tensors)
    assert (metadata, tensors) == (expected_metadata, expected)


def test_lfm2(tmp_path: Path) -> None:
    gguf_of(tiny_model("llama"), tmp_path / "usual.gguf")
    _, tensors = content(tmp_path / "usual.gguf")
    norm, metadata = tensors["output_norm.weight"], {"general.architecture": "lfm2", "lfm2.feed_forward_length": 7}
    adapt(metadata, tensors)
    assert "output_norm.weight" not in tensors
    assert tensors["token_embd_norm.weight"].start == norm.start
    assert metadata["lfm2.feed_forward_length"] == 96
