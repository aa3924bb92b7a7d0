"""What is in memory while weights are packed: the packed ones, and one matrix at a time of those that are stored in another layout."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import byte_level_metadata, finish, tiny_model, writer_of
from quantised_checkpoints import FORMATS
from safetensors.torch import load_file, save_file

from chairlift.checkpoint.safetensors_file import SafetensorsFile
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.models.fields import read_json
from chairlift.runner import expert_weights
from chairlift.runner.cpu_decoder import build_decoder
from chairlift.runner.weights import SafetensorWeights

COUNT, HIDDEN, INNER = 16, 128, 96
EXPERTS = {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": 16, "num_hidden_layers": 1}
MATRIX = 4 * HIDDEN * INNER
"""Bytes of a matrix of an expert in fp32."""


def save(directory: Path, tensors: dict[str, torch.Tensor], raw: dict[str, object]) -> None:
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw))


def write_quantised(directory: Path, form: str) -> dict[str, torch.Tensor]:
    """A mixture whose experts, and nothing else, are in one of the quantised formats. Returns what they stand for."""
    tiny_model("qwen3_moe", num_experts=COUNT, num_experts_per_tok=2, moe_intermediate_size=INNER, **EXPERTS).save_pretrained(directory)
    pack, config = FORMATS[form]
    tensors, stands_for = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        parts, stands_for[name] = pack(tensor)
        tensors |= {f"{name.removesuffix('weight')}{kind}": part for kind, part in parts.items() if kind != "bias"}
    save(directory, tensors, read_json(directory) | {"quantization_config": config})
    return stands_for


def write_gpt_oss(directory: Path, form: str) -> None:
    """A mixture whose experts are in one tensor, transposed in bfloat16, or in MXFP4."""
    tiny_model("gpt_oss", num_local_experts=COUNT, num_experts_per_tok=2, **EXPERTS).save_pretrained(directory)
    tensors, raw = load_file(directory / "model.safetensors"), read_json(directory)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        whole = tensors.pop(name)
        if form == "bfloat16":
            tensors[name] = whole.to(torch.bfloat16)
        else:
            count, ins, outs = whole.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (count, outs, ins // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(119, 125, (count, outs, ins // 32), dtype=torch.uint8)
            raw["quantization_config"] = {"quant_method": "mxfp4"}
    save(directory, tensors, raw)


def pack(directory: Path) -> None:
    model = ModelConfig.load(directory)
    build_decoder(model, SafetensorWeights(directory, model.scheme), "kept", 1, "auto", 64)


@pytest.mark.parametrize("form", ["gptq", "awq", "packed", "fp8 in blocks", "floats by row", "bfloat16", "mxfp4"])
def test_one_matrix_of_an_expert_is_made_at_a_time(tmp_path: Path, form: str) -> None:
    (write_gpt_oss if form in ("bfloat16", "mxfp4") else write_quantised)(tmp_path, form)
    tracemalloc.start()
    try:
        pack(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # numpy makes a few copies of a quantised matrix on the way. All experts have 48 matrices, which take an eighth in MXFP4.
    assert peak < (8 if form in FORMATS else 4) * MATRIX, f"{peak / MATRIX:.1f} matrices"


@pytest.mark.parametrize("form", ["gptq", "fp8 in blocks"])
def test_the_experts_that_are_made_are_those_that_a_checkpoint_stands_for(tmp_path: Path, form: str) -> None:
    stands_for, model = write_quantised(tmp_path, form), ModelConfig.load(tmp_path)
    weights, prefix = SafetensorWeights(tmp_path, model.scheme), "model.layers.0."
    assert model.experts
    stacks = [
        *expert_weights.gate_and_up(weights, model.experts, prefix, HIDDEN),
        expert_weights.down(weights, model.experts, prefix, HIDDEN),
    ]
    for name, stack in zip(("gate_proj", "up_proj", "down_proj"), stacks, strict=True):
        for expert, (kind, rows, make, _) in enumerate(stack):
            whole = stands_for[f"{prefix}mlp.experts.{expert}.{name}.weight"].numpy()
            assert (kind, rows) == ("float32", len(whole))
            np.testing.assert_array_equal(make().view(np.float32).reshape(whole.shape), whole)


@pytest.mark.parametrize("form", ["gptq", "mxfp4"])
def test_pages_of_experts_are_dropped_once_they_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    (write_gpt_oss if form == "mxfp4" else write_quantised)(tmp_path, form)
    dropped: set[tuple[int, int]] = set()
    monkeypatch.setattr("chairlift.runner.file_pages.available_memory", lambda: 0)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: dropped.add((start, size)))
    pack(tmp_path)
    tensors = SafetensorsFile(tmp_path / "model.safetensors").tensors
    experts = {name: (entry.start, entry.size) for name, entry in tensors.items() if ".experts." in name and not name.endswith("bias")}
    assert not [name for name, place in experts.items() if place not in dropped]


def test_what_is_wrong_with_a_matrix_that_is_made_is_said_as_for_one_that_is_read(tmp_path: Path) -> None:
    write_quantised(tmp_path, "fp8 in blocks")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.7.up_proj.weight_scale_inv"
    save(tmp_path, tensors | {name: tensors[name][1:]}, read_json(tmp_path))
    with pytest.raises(UnsupportedModel, match=rf"tensor {name} is \[.*\] where config.json asks for "):
        pack(tmp_path)


KINDS = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q6_K", "ffn_down_exps": "IQ2_S"}


def write_gguf(path: Path, count: int = 16, hidden: int = 512, inner: int = 1024) -> None:
    """A mixture of two layers with weights of zero. Most of the file are experts, in the types of KINDS."""
    sizes = {"context_length": 64, "embedding_length": hidden, "block_count": 2, "feed_forward_length": inner}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 4, "attention.key_length": 64, "attention.layer_norm_rms_epsilon": 1e-5}
    sizes |= {"rope.freq_base": 1e4, "expert_count": count, "expert_used_count": 2, "expert_feed_forward_length": inner}
    metadata = {f"qwen3moe.{name}": value for name, value in sizes.items()}
    writer = writer_of(path, {"general.architecture": "qwen3moe", **metadata, **byte_level_metadata("gpt-2")})
    shapes = {"token_embd": (320, hidden), "output": (320, hidden)}
    for layer in range(2):
        parts = {f"ffn_{name}_exps": (count, inner, hidden) for name in ("gate", "up")} | {"ffn_down_exps": (count, hidden, inner)}
        parts |= {f"attn_{name}": (256, hidden) for name in "qkv"} | {"attn_output": (hidden, 256), "ffn_gate_inp": (count, hidden)}
        parts |= {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q_norm": (64,), "attn_k_norm": (64,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    for name, shape in (shapes | {"output_norm": (hidden,)}).items():
        if (last := name.rsplit(".", 1)[-1]) in KINDS:
            kind = gguf.GGMLQuantizationType[KINDS[last]]
            elements, size = gguf.GGML_QUANT_SIZES[kind]
            writer.add_tensor(f"{name}.weight", np.zeros((*shape[:-1], shape[-1] // elements * size), np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    finish(writer)


LOAD = """
import sys
from pathlib import Path
from chairlift.checkpoint.gguf import convert
from chairlift.models.config import ModelConfig
from chairlift.runner.cpu_decoder import build_decoder
from chairlift.runner.weights import open_weights
from chairlift.config import EngineConfig

def of_status(name):
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

directory = Path(sys.argv[1]).with_suffix("")
convert(Path(sys.argv[1]), directory)
model, weights = ModelConfig.load(directory), open_weights(EngineConfig(device="cpu"), directory)
Path("/proc/self/clear_refs").write_text("5")
before = of_status("VmRSS")
decoder = build_decoder(model, weights, "kept", 1, "auto", 64)
print(of_status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the highest memory from Linux")
def test_packing_a_file_with_experts_takes_little_more_memory_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    found = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], env=os.environ, capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert 0.8 <= int(found.stdout) / path.stat().st_size <= 1.15
