"""Adapter files in peft's format: what is read, and what is refused with one line."""

import json
import os
from pathlib import Path

import adapters
import numpy as np
import pytest
from safetensors.numpy import save_file

from chairlift.checkpoint.adapter import AdapterFiles
from chairlift.errors import UnsupportedModel

FLOAT32, NAN = (6).to_bytes(4, "little"), np.float32("nan").tobytes()
"""GGUF's number of the type, and one of its values."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_matrices_of_two_dtypes_are_read_as_float32(model: Path, tmp_path: Path) -> None:
    tensors = adapters.matrices(model)
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.lora_B"] = tensors[f"{name}.lora_B"].astype(np.float16)
    files = AdapterFiles(adapters.write(tmp_path / "a", tensors))
    update = files.updates[1, "up_proj"]
    assert (len(files.updates), files.rank, update.scale) == (14, 4, 2.0)
    assert (update.kind, update.inputs, update.outputs) == ("float32", 32, 48)
    assert np.array_equal(update.a.view(np.float32).reshape(4, 32), tensors[f"{name}.lora_A"])
    assert np.array_equal(update.b.view(np.float32).reshape(48, 4), tensors[f"{name}.lora_B"].astype(np.float32))


def test_the_digest_is_that_of_the_content(model: Path, tmp_path: Path) -> None:
    one = AdapterFiles(adapters.random(tmp_path / "one", model))
    assert AdapterFiles(adapters.random(tmp_path / "same", model)).digest == one.digest
    tensors = adapters.matrices(model)
    tensors["model.layers.0.mlp.up_proj.lora_A"][0, 0] += 1
    assert AdapterFiles(adapters.write(tmp_path / "one", tensors)).digest != one.digest
    assert AdapterFiles(adapters.write(tmp_path / "one", adapters.matrices(model), alpha=9)).digest != one.digest


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "changes biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alora_invocation_tokens": [5]}, "activated LoRA"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"made_up": {"a": 1}}, "sets made_up, which is not known here and may change answers"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"init_lora_weights": "pissa_niter_4"}, "also changes the base"),
        ({"init_lora_weights": "lora_ga"}, "also changes the base"),
        ({"rank_pattern": {"(": 8}}, "rank_pattern is not an object whose names are patterns"),
        ({"rank_pattern": {"(?=a)b": 8}}, "patterns without lookaround and backreferences"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern or alpha_pattern has a value that is no rank"),
        ({"alpha_pattern": {"q_proj": "8"}}, "rank_pattern or alpha_pattern has a value that is no rank or no alpha"),
        ({"alpha_pattern": [8]}, "alpha_pattern is not an object"),
        ({"r": 8}, "do not have the rank r = 8"),
        ({"r": "4"}, "r is '4'"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
    ],
)
def test_configurations_that_ask_for_more_are_refused(model: Path, tmp_path: Path, config: dict[str, object], message: str) -> None:
    path = adapters.random(tmp_path / "a", model)
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(settings | config))
    with pytest.raises(UnsupportedModel, match=message) as refused:
        AdapterFiles(path)
    assert "\n" not in str(refused.value)


def test_a_pattern_for_which_python_would_try_all_ways_to_match_takes_no_time(model: Path, tmp_path: Path) -> None:
    path = adapters.write(tmp_path / "a", adapters.matrices(model), rank_pattern={"(.*)*x": 8, "(.*a){20}": 8})
    assert {update.rank for update in AdapterFiles(path).updates.values()} == {4}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", (4, 9), "changes base_model.model.model.embed_tokens.lora_embedding_A"),
        ("lm_head.lora_A", (4, 9), "only q_proj, k_proj"),
        ("model.layers.0.self_attn.qkv_proj.lora_A", (4, 9), "only one of the two matrices of qkv_proj"),
        ("model.layers.0.self_attn.kv_proj.lora_A", (4, 9), "only q_proj, k_proj"),
        ("model.layers.7.mlp.up_proj.lora_A", (4, 32), "only one of the two matrices of up_proj"),
        ("model.layers.0.mlp.up_proj.lora_A", (3, 32), r"matrices of \[3, 32\] and \[48, 4\]"),
        ("model.layers.0.mlp.up_proj.lora_A", (4,), r"matrices of \[4\] and"),
        (
            "model.layers.0.self_attn.out_proj.lora_A",
            (4, 32),
            r"self_attn\.o_proj.* and .*self_attn\.out_proj.* both change o_proj of layer 0",
        ),
        ("text.layers.01.mlp.up_proj.lora_B", (48, 4), "both change up_proj of layer 1"),
        ("model.vision_tower.encoder.layers.3.mlp.up_proj.lora_A", (4, 9), r"it changes base_model\.model\.model\.vision_tower"),
        ("model.visual.layers.3.self_attn.q_proj.lora_A", (4, 9), r"it changes base_model\.model\.model\.visual"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(model: Path, tmp_path: Path, name: str, shape: tuple[int, ...], message: str) -> None:
    tensors = adapters.matrices(model) | {name: np.zeros(shape, dtype=np.float32)}
    with pytest.raises(UnsupportedModel, match=message):
        AdapterFiles(adapters.write(tmp_path / "a", tensors))


@pytest.mark.parametrize(("dtype", "bits"), [("F32", 0x7FC0_0000), ("F32", 0xFF80_0000), ("F16", 0x7C00), ("BF16", 0xFF81)])
def test_matrices_with_numbers_that_are_not_finite_are_refused(tmp_path: Path, dtype: str, bits: int) -> None:
    layer, size = "model.layers.0.mlp.up_proj", 4 if dtype == "F32" else 2
    ones = {f"{layer}.lora_{name}": np.ones(shape, f"f{size}") for name, shape in (("A", (4, 32)), ("B", (48, 4)))}
    path = adapters.write(tmp_path / "a", ones)
    file = path / "adapter_model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(b'"F16"', f'"{dtype}"'.encode())
    content = len(header).to_bytes(8, "little") + header + content[end:]
    file.write_bytes(content)
    AdapterFiles(path)
    file.write_bytes(content[:-size] + bits.to_bytes(size, "little"))
    with pytest.raises(UnsupportedModel, match=rf"{layer}\.lora_B\.weight has numbers that are NaN or infinite"):
        AdapterFiles(path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_fifo_or_a_device_in_place_of_a_file_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    path = adapters.random(tmp_path / "a", model) / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnsupportedModel, match=f"{name} is no regular file"):
        AdapterFiles(path.parent)
    with pytest.raises(UnsupportedModel, match=r"adapter_config\.json cannot be read"):
        AdapterFiles(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UnsupportedModel, match=f"{name} is no regular file"):
        AdapterFiles(path.parent)


def test_a_gguf_file_that_is_no_plain_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.gguf", adapters.matrices(model)
    files = AdapterFiles(adapters.write_gguf(path, tensors, 4, 2, alpha=0))
    assert {(update.rank, update.scale) for update in files.updates.values()} == {(4, 1.0)}  # as llama.cpp computes files without an alpha
    assert {module for (_, module), update in files.updates.items() if update.alternates} == {"q_proj", "k_proj"}
    whole = path.read_bytes()
    changes = {
        (b"adapter.lora.alpha", b"adapter.lora.gamma"): "its metadata has adapter.lora.gamma, which is not known",
        (b"adapter.lora.alpha" + FLOAT32 + bytes(4), b"adapter.lora.alpha" + FLOAT32 + NAN): "adapter.lora.alpha is nan",
        (b"adapter.type", b"adapter.typo"): "not of a LoRA adapter",
        (b"llama", b"lmama"): "architecture 'lmama', which cannot be read",
        (b"blk.0.attn_q.weight.lora_a", b"blk.0.attn_q.weight.lora_c"): r"it changes blk\.0\.attn_q\.weight\.lora_c: only",
    }
    for (old, new), message in changes.items():
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(UnsupportedModel, match=f"^adapter .*{message}"):
            AdapterFiles(path)
    path.write_bytes(whole[:-8])
    with pytest.raises(UnsupportedModel, match="damaged or incomplete"):
        AdapterFiles(path)


def test_missing_and_corrupt_files_are_refused_with_one_line(model: Path, tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(UnsupportedModel, match=message) as error:
            AdapterFiles(path)
        assert "\n" not in str(error.value)

    path = tmp_path / "none"
    refused("adapter_config.json cannot be read")
    path = adapters.random(tmp_path / "a", model)
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    whole = weights.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        refused("cannot be read as safetensors")
    weights.write_bytes(bytes(range(256)) * 10)
    refused("cannot be read as safetensors")
    save_file({}, weights)
    refused("has no matrices")
    save_file(
        {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.zeros((4, 32))}
        | {"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": np.zeros((48, 4))},
        weights,
    )
    refused("is in F64")
    weights.unlink()
    refused("adapter_model.safetensors is missing")
    for text in (b"", b"[1]", b"\xff", b"{" * 10_000):
        config.write_bytes(text)
        refused("adapter_config.json")
