"""Files that Ollama converted itself are read as those of llama.cpp's converter."""

from pathlib import Path
from typing import Any

import cpu_logits
import gguf_recurrent
import numpy as np
import pytest
import tiny_encoders
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
    assert expected_metadata["gpt-oss.rope.scaling.type"] == "yarn"
    for key in ("expert_feed_forward_length", "rope.scaling.type"):
        del metadata[f"gptoss.{key}"]
    expected_metadata["tokenizer.ggml.pre"] = "gpt-4o"
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


@pytest.mark.parametrize("kind", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("order", ["llama.cpp's", "Hugging Face's"])
def test_qwen_3_5(tmp_path: Path, kind: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gguf_recurrent.rounded_model("qwen3_5_moe_text" if kind.endswith("moe") else "qwen3_5_text")
    gguf_recurrent.write(model, tmp_path / "usual.gguf")
    own: dict[str, Any] = {"rope.mrope_interleaved": True, "mrope_sections": [11, 11, 10], "image_token_id": 7, "vision.block_count": 2}
    own |= {"feed_forward_length": 0} if kind.endswith("moe") else {}
    if order == "llama.cpp's":
        own |= {"ssm.v_head_reordered": True}
    else:
        monkeypatch.setattr(gguf_recurrent, "_tiled", lambda name, weights, config: weights)
    gguf_recurrent.write(model, tmp_path / "ollama.gguf", replaced=own)
    logits = []
    for name in ("usual", "ollama"):
        convert(tmp_path / f"{name}.gguf", tmp_path / name)
        logits.append(cpu_logits.logits(tmp_path / name))
    assert np.abs(logits[0] - logits[1]).max() < 1e-5
    metadata, tensors = content(tmp_path / "usual.gguf")
    expected = dict(tensors)
    tensors = {name.removesuffix(".bias") if name.endswith(".ssm_dt.bias") else name: entry for name, entry in tensors.items()}
    assert tensors.keys() != expected.keys()
    adapt(metadata, tensors)
    assert tensors == expected


def test_a_mixture_without_mlps_needs_no_size_of_them(tmp_path: Path) -> None:
    model = gguf_recurrent.rounded_model("qwen3_5_moe_text")
    for name, size in (("usual", 96), ("published", None)):
        gguf_recurrent.write(model, tmp_path / f"{name}.gguf", replaced={"feed_forward_length": size})
        convert(tmp_path / f"{name}.gguf", tmp_path / name)
    assert np.array_equal(*(cpu_logits.logits(tmp_path / name) for name in ("usual", "published")))


def test_qwen_2_5_vl(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    gguf_of(model, tmp_path / "usual.gguf")
    metadata, _ = content(tmp_path / "usual.gguf")
    own = {key: value for key, value in metadata.items() if key.startswith("qwen2.")}
    renamed = {f"qwen25vl.{key.removeprefix('qwen2.')}": value for key, value in own.items()}
    renamed |= {"qwen25vl.rope.mrope_section": [16, 24, 24], "qwen25vl.vision.block_count": 32}
    gguf_of(model, tmp_path / "ollama.gguf", replaced={"general.architecture": "qwen25vl", **dict.fromkeys(own), **renamed})
    for name in ("usual", "ollama"):
        convert(tmp_path / f"{name}.gguf", tmp_path / name)
    assert np.array_equal(*(cpu_logits.logits(tmp_path / name) for name in ("usual", "ollama")))


def test_embeddinggemma(tmp_path: Path) -> None:
    tiny_encoders.gguf_of(tiny_encoders.write("Gemma3Text", tmp_path / "hf"), tmp_path / "usual.gguf")
    expected_metadata, expected = content(tmp_path / "usual.gguf")
    del expected_metadata["gemma-embedding.attention.sliding_window_pattern"]
    metadata = {key.replace("gemma-embedding.", "gemma3."): value for key, value in expected_metadata.items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.attention.causal": False}
    names = {"dense_2.weight": "dense.0.weight", "dense_3.weight": "dense.1.weight", "output_norm.weight": "norm.weight"}
    tensors = {names.get(name, name): entry for name, entry in expected.items()}
    adapt(metadata, tensors)
    assert metadata == expected_metadata | {"gemma-embedding.rope.freq_base_swa": 1e4}
    assert tensors == expected


TOKENS = [""] * 128_009 + ["<|eot_id|>"]
GPT2 = {"tokenizer.ggml.model": "gpt2"}
METADATA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ministral": (
        {
            "general.architecture": "mistral3",
            "mistral3.rope.scaling.beta_fast": 32.0,
            "mistral3.rope.scaling.beta_slow": 1.0,
            "mistral3.rope.scaling.mscale": 1.0,
            "mistral3.rope.scaling.mscale_all_dim": 1.0,
            "mistral3.rope.scaling_beta": 0.1,
            "mistral3.mm.projector_bias": False,
            "mistral3.image_token_index": 10,
            "mistral3.spatial_merge_size": 2,
            **GPT2,
            "tokenizer.ggml.pre": "default",
        },
        {
            "general.architecture": "mistral3",
            "mistral3.rope.scaling.yarn_beta_fast": 32.0,
            "mistral3.rope.scaling.yarn_beta_slow": 1.0,
            "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
            "mistral3.attention.temperature_scale": 0.1,
            **GPT2,
            "tokenizer.ggml.pre": "tekken",
        },
    ),
    "another factor of YaRN is left, and reported": (
        {"general.architecture": "mistral3", "mistral3.rope.scaling.mscale": 0.7},
        {"general.architecture": "mistral3", "mistral3.rope.scaling.mscale": 0.7},
    ),
    "glm-4.7-flash": (
        {"general.architecture": "glm4moelite", "glm4moelite.attention.key_length": 256, **GPT2, "tokenizer.ggml.pre": "default"},
        {
            "general.architecture": "deepseek2",
            "deepseek2.attention.key_length": 256,
            "deepseek2.attention.key_length_mla": 256,
            "deepseek2.attention.value_length_mla": 256,
            "deepseek2.expert_gating_func": 2,
            **GPT2,
            "tokenizer.ggml.pre": "glm4",
        },
    ),
    "nemotron": (
        {"general.architecture": "nemotron_h_omni", "nemotron_h_omni.audio.block_count": 4, "nemotron_h_omni.block_count": 2},
        {"general.architecture": "nemotron_h_moe", "nemotron_h_moe.block_count": 2},
    ),
    "gemma 4": (
        {"general.architecture": "gemma4", "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "gemma4"},
        {"general.architecture": "gemma4", "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.pre": "gemma4"},
    ),
    "llama 3": (
        {"general.architecture": "llama", **GPT2, "tokenizer.ggml.tokens": TOKENS},
        {"general.architecture": "llama", **GPT2, "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.pre": "llama-bpe"},
    ),
    "another llama": (
        {"general.architecture": "llama", **GPT2, "tokenizer.ggml.tokens": ["a"]},
        {"general.architecture": "llama", **GPT2, "tokenizer.ggml.tokens": ["a"]},
    ),
    "letters of base64": (
        {"general.architecture": "bert", "tokenizer.ggml.precompiled_charsmap": list("AAEC/w==")},
        {"general.architecture": "bert", "tokenizer.ggml.precompiled_charsmap": [0, 1, 2, 255]},
    ),
    "letters of no base64": (
        {"general.architecture": "bert", "tokenizer.ggml.precompiled_charsmap": ["?"]},
        {"general.architecture": "bert", "tokenizer.ggml.precompiled_charsmap": [0]},
    ),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata(name: str) -> None:
    given, expected = METADATA[name]
    metadata = dict(given)
    adapt(metadata, {})
    assert metadata == expected


def test_scales_of_experts_of_gemma_4(tmp_path: Path) -> None:
    gguf_of(tiny_model("llama"), tmp_path / "usual.gguf")
    _, tensors = content(tmp_path / "usual.gguf")
    scales = {"blk.1.ffn_gate_inp.per_expert_scale": tensors["output_norm.weight"]}
    adapt({"general.architecture": "gemma4"}, scales)
    assert list(scales) == ["blk.1.ffn_down_exps.scale"]
