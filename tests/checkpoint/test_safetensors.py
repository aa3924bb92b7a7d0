import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from chairlift.checkpoint.safetensors_file import SafetensorsFile, as_float32
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.runner.torch_weights import TorchWeights
from chairlift.runner.weights import SafetensorWeights

CPU = torch.device("cpu")


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, ...] = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_those_that_the_safetensors_package_wrote(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in {"a": (3, 5), "b": (7,), "c": ()}.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = SafetensorWeights(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(as_float32(weights.take(name, *tensor.shape)), tensor.float().numpy())
        assert torch.equal(TorchWeights(weights, dtype, CPU).take(name, *tensor.shape), tensor)
    with pytest.raises(UnsupportedModel, match=r"tensor a is \[3, 5\] where config.json asks for \[5, 3\]"):
        weights.take("a", 5, 3)
    with pytest.raises(UnsupportedModel, match="has no tensor d"):
        weights.part("d", 1, 1)


def test_other_dtypes_are_refused_only_where_they_are_used(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.int64), "b": torch.ones(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    weights = SafetensorWeights(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"tensor a is I64 \(supported: float32, float16, bfloat16\)"):
        weights.take("a", 2)
    with pytest.raises(UnsupportedModel, match="tensor b is F8_E4M3"):
        weights.part("b", 2, 2)


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"a": entry(offsets=(0, 16), shape=(4,))}, b"12345678", "tensor a ends at byte .* of"),
        ({"a": entry(offsets=(8, 0))}, b"12345678", "offsets"),
        ({"a": entry(offsets=(-8, 0))}, b"12345678", "offsets"),
        ({"a": entry(shape=(3,))}, b"12345678", r"shape \[3\] and dtype F32 has 8 bytes"),
        ({"a": entry(shape=(-2,))}, b"12345678", "shape"),
        ({"a": entry(shape=(True, 2))}, b"12345678", "shape"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"12345678", "data_offsets"),
        ({"a": entry(offsets=(0,))}, b"12345678", "unpack"),
        ({"a": entry() | {"more": 1}}, b"12345678", "more"),
        ({"a": [1, 2]}, b"", "mapping"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"123456789012", "tensor b begins at byte .*, and the one before it ends at"),
        ({"a": entry(), "b": entry()}, b"12345678", "tensor b begins at byte .*, and the one before it ends at"),
        ({"a": entry(offsets=(4, 12))}, b"123456789012", "tensor a begins at byte .*, and the one before it ends at"),
        ({"a": entry()}, b"12345678 ", "the tensors end at byte .* of"),
        (b'{"a": {}, "a": {}}', b"", "a name occurs twice"),
        ([1], b"", "not a table of tensors"),
        (b"[" * 100_000, b"", "recursion"),
        (b"{not json", b"", "Expecting"),
        (b"\xff\xfe{}", b"", "decode"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(header: Any, data: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"cannot be read as safetensors \(.*{reason}.*\): is the download complete"):
        SafetensorsFile(write(tmp_path / "a.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"\x01\x00\x00", (2**62).to_bytes(8, "little") + b"{}", (200).to_bytes(8, "little") + b"{}"])
def test_files_without_a_whole_header_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"the header takes .* bytes of"):
        SafetensorsFile(path)


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    weights = SafetensorWeights(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(UnsupportedModel, match="tensor a ends beyond it: it became shorter"):
        weights.take("a", 100)


def test_tensors_that_were_not_used_are_named(tmp_path: Path) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    raw |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    scales = ("x.k_scale", "x.kv_scale", "x.q_scale", "x.k_proj.output_scale")  # of what is in 8 bits elsewhere
    tables = ("x.rotary_emb.inv_freq", "x.rotary_emb.cos_cached", "x.rotary_emb.sin_cached", "x.attn.bias", "x.attention.masked_bias")
    save_file({name: torch.ones(2) for name in ("a", "b", *scales, *tables)}, tmp_path / "model.safetensors")
    weights = SafetensorWeights(tmp_path)
    weights.take("a", 2)
    with pytest.raises(UnsupportedModel, match=r"does not account for: b$"):
        weights.finish(ModelConfig.parse(raw))
