"""GGUF files on the CPU's kernels: every block type to the bit, mixed types, types that become fp32, damaged files."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cpu_logits import IN_FP32, logits
from gguf_files import MULTIPLIERS, TINY, gguf_of, random_blocks, tiny_model, write_safetensors
from runner_steps import Driver
from transformers import AutoModelForCausalLM

from chairlift import _core
from chairlift.checkpoint.cache import LINK
from chairlift.checkpoint.gguf import convert
from chairlift.config import EngineConfig
from chairlift.errors import ModelNotFound, UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.runner import gguf_grids
from chairlift.runner.build import build_runner
from chairlift.runner.gguf_grids import GRID_TYPES, provide_grids
from chairlift.runner.memory.precision import Precision
from chairlift.runner.weights import GGUFWeights

Kind = gguf.GGMLQuantizationType
GEMMA4 = next(entry for entry in TINY if entry[0] == "gemma4_text")
TYPES = sorted({*map(Kind, _core.block_types()), *map(Kind, GRID_TYPES)})


def converted(path: Path, model: Any, *args: Any, **kwargs: Any) -> Path:
    """A directory for a model in a GGUF file."""
    gguf_of(model, path, *args, **kwargs)
    out = path.with_suffix("")
    convert(path, out)
    return out


def zeros(rows: int, ins: int) -> tuple[str, int, np.ndarray, int]:
    return "float32", rows, np.zeros(4 * rows * ins, np.uint8), 0


def as_computed(kind: Kind, blocks: np.ndarray, size: int, together: int) -> np.ndarray:
    """A square matrix as the kernels compute with it: its products with unit vectors, `together` of them at once.

    It is the head of a model whose embeddings are the unit vectors, and whose one layer changes nothing.
    """

    def linear(*tensors: tuple[str, int, Any, int], ins: int, gated: bool = False) -> _core.Linear:
        return _core.Linear([[tensor] for tensor in tensors], ins, "kept", threads=2, gated=gated)

    units = ("float32", size, np.eye(size, dtype=np.float32).reshape(-1).view(np.uint8), 0)
    ones = np.ones(size, np.float32)
    attention = _core.DecoderBlock.attention(
        norm=ones,
        qkv_proj=linear(zeros(2, size), zeros(2, size), zeros(2, size), ins=size),
        kv=(0, 0, False),
        o_proj=linear(zeros(size, 2), ins=2),
        scale=1.0,
    )
    mlp = _core.DecoderBlock.mlp(
        norm=ones,
        gate_up_proj=linear(zeros(4, size), zeros(4, size), ins=size, gated=True),
        down_proj=linear(zeros(size, 4), ins=4),
    )
    decoder = _core.Decoder(
        [attention, mlp],
        # The norm of a unit vector multiplies it by 16, which this undoes.
        norm=np.full(size, 1 / np.sqrt(size), np.float32),
        head=linear((str(int(kind)), size, blocks.reshape(-1), 0), ins=size),
        embedding=linear(units, ins=size),
        hidden_size=size,
        num_heads=1,
        kv_heads=[(1, 2, None)],
        rms_norm_eps=0.0,
        ropes=[],
        threads=2,
    )
    cache = _core.KvCache(parts=[(1, 1, 2, None)], blocks=1, block_size=size, dtype="float32")
    ids = np.arange(size, dtype=np.int32)
    starts, lens, tables = np.array([0, size], np.int32), np.array([size], np.int32), np.zeros((1, 1), np.int32)
    step = {"input_ids": ids, "positions": ids, "slot_mapping": ids, "query_starts": starts, "context_lens": lens, "block_tables": tables}
    decoder.forward(cache, batch_slots=np.zeros(1, np.int32), **step)
    columns = []
    for at in range(0, size, together):
        out = np.empty((together, size), np.float32)
        decoder.logits(ids[at : at + together], out)
        columns.append(out)
    return np.concatenate(columns).T


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("together", [1, 4, 256])
@pytest.mark.slow
def test_the_kernels_compute_with_the_weights_of_the_gguf_package(kind: Kind, together: int) -> None:
    provide_grids([kind], Path("blocks"))
    blocks = random_blocks(kind, 256, 256)
    expected = gguf.dequantize(blocks, kind)
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 15
    np.testing.assert_array_equal(as_computed(kind, blocks, 256, together), expected)


@pytest.mark.parametrize("kind", [*TYPES, Kind.F16, Kind.BF16, Kind.F32, Kind.TQ2_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.slow
def test_a_file_gives_the_logits_of_its_weights_in_fp32(tmp_path: Path, kind: Kind, architecture: str) -> None:
    """Bit for bit in fp32, because the kernels sum expanded weights in the same order. Sums of integers are as close."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    directory = converted(tmp_path / "tiny.gguf", tiny_model(architecture, **sizes), kind)
    whole = logits(directory, Precision("float32", "none", "float32"))
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(logits(directory, config=IN_FP32), whole)
    assert np.abs(logits(directory) - whole).max() <= 1e-5 * np.abs(whole).max()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize(("architecture", "settings"), TINY)
@pytest.mark.slow
def test_a_file_gives_the_logits_of_transformers(tmp_path: Path, architecture: str, settings: dict[str, Any], kind: Kind) -> None:
    directory = converted(tmp_path / "tiny.gguf", tiny_model(architecture, **settings), kind)
    write_safetensors(directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = reference(torch.arange(11)[None] * 7 % 300).logits[0].numpy()
    assert np.abs(logits(directory) - expected).max() <= 1e-5 * np.abs(expected).max()
    assert ModelConfig.load(directory).unread == ()


@pytest.mark.parametrize("positions", ["rope", "nope"])
@pytest.mark.slow
def test_dense_granite_4_has_rotary_positions_or_none(tmp_path: Path, positions: str) -> None:
    dense = {"num_local_experts": 0, "shared_intermediate_size": 96, "layer_types": ["full_attention"] * 2, "mamba_n_heads": 8}
    model = tiny_model("granitemoehybrid", **MULTIPLIERS, **dense, position_embedding_type=positions)
    directory = converted(tmp_path / "tiny.gguf", model, Kind.F32)
    with torch.inference_mode():
        expected = model(torch.arange(11)[None] * 7 % 300).logits[0].numpy()
    assert np.abs(logits(directory) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_matrices_of_one_layer_may_differ_in_type(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    prefix = "model.layers.0."
    kinds = {"self_attn.q_proj": Kind.Q4_K, "self_attn.k_proj": Kind.Q5_0, "self_attn.v_proj": Kind.Q6_K}
    kinds |= {"mlp.gate_proj": Kind.Q4_K, "mlp.up_proj": Kind.F16}
    named = {prefix + name: kind for name, kind in kinds.items()}
    directory = converted(tmp_path / "mixed.gguf", model, Kind.Q8_0, kinds=named)
    np.testing.assert_array_equal(logits(directory, config=IN_FP32), logits(directory, Precision("float32", "none", "float32")))
    near = logits(directory, Precision("blocks", "int8", "float32"))
    assert np.corrcoef(near.ravel(), logits(directory).ravel())[0, 1] > 0.99


@pytest.mark.parametrize(
    ("family", "factors"),
    [
        ("llama", {"blk.0.attn_q": [4.0], "blk.1.ffn_down": [0.5]}),
        ("qwen3_moe", {"blk.1.ffn_down_exps": [0.5, 2.0, 4.0], "blk.0.attn_v": [8.0]}),
    ],
)
def test_matrices_may_have_factors_as_in_files_of_nvfp4(tmp_path: Path, family: str, factors: dict[str, list[float]]) -> None:
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    model = tiny_model(family, **experts)
    expected = logits(converted(tmp_path / "plain.gguf", model, Kind.F32))
    np.testing.assert_array_equal(logits(converted(tmp_path / "scaled.gguf", model, Kind.F32, factors=factors)), expected)
    wrong = converted(tmp_path / "wrong.gguf", model, Kind.F32, factors={"blk.0.attn_q": [1.0] * 64})
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.0\.attn_q\.scale must have one number for each matrix"):
        logits(wrong)


@pytest.mark.parametrize(
    ("installed", "advice"),
    [(None, "one more package: pip install gguf"), (SimpleNamespace(), "a newer gguf package: pip install -U gguf")],
)
def test_types_with_grids_need_the_gguf_package(installed: Any, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    directory = converted(tmp_path / "tiny.gguf", model, Kind.IQ3_XXS)
    assert GGUFWeights(directory / LINK).sizes()[1] == 0
    monkeypatch.setattr(gguf_grids, "_core", SimpleNamespace(block_types=list))  # other tests may have provided the grid
    monkeypatch.setitem(sys.modules, "gguf.quants", installed)
    with pytest.raises(UnsupportedModel, match=f"has tensors of type IQ3_XXS, which need {advice}"):
        GGUFWeights(directory / LINK)


def test_a_grid_must_be_that_of_its_type() -> None:
    for kind, size in ((12, 2048), (16, 2047)):
        with pytest.raises(ValueError, match=f"ggml type {kind}"):
            _core.provide_grid(kind, np.ones(size, np.int8))
    with pytest.raises(ValueError, match="not the grid of ggml type 16"):
        _core.provide_grid(16, np.zeros(2048, np.int8))


def test_types_that_become_fp32_are_named_with_their_size_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    kinds = {"model.embed_tokens": Kind.TQ1_0, "lm_head": Kind.TQ2_0}
    directory = converted(tmp_path / "mixed.gguf", model, Kind.Q4_K, kinds=kinds)
    with caplog.at_level(logging.WARNING, logger="chairlift"):
        kept, expanded = GGUFWeights(directory / LINK).sizes()
    assert expanded == 2 * 320 * 256 * 4
    assert 0 < kept < (tmp_path / "mixed.gguf").stat().st_size
    # Other loggers may report what earlier tests left to the garbage collector.
    (record,) = (record for record in caplog.records if record.name.startswith("chairlift"))
    assert "tensors of type TQ1_0, TQ2_0 are not computed with as they are, and take 1 MiB as float32" in record.getMessage()
    caplog.clear()
    assert GGUFWeights(converted(tmp_path / "plain.gguf", model, Kind.Q4_K) / LINK).sizes()[1] == 0
    assert not [record for record in caplog.records if record.name.startswith("chairlift")]


def test_tensors_are_those_of_the_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    directory = converted(tmp_path / "tiny.gguf", model, Kind.F32)
    weights = GGUFWeights(directory / LINK)
    for name, value in model.state_dict().items():
        assert np.array_equal(weights.take(name, *value.shape), value.numpy()), name
    weights.finish(ModelConfig.load(directory))
    with pytest.raises(
        UnsupportedModel, match=r"metadata does not account for: lm_head.weight, model.embed_tokens.weight, model.l.* and 18 more"
    ):
        GGUFWeights(directory / LINK).finish(ModelConfig.load(directory))
    with pytest.raises(UnsupportedModel, match=r"lm_head.weight is \[320, 64\] where the configuration asks for \[3, 64\]"):
        weights.take("lm_head.weight", 3, 64)
    with pytest.raises(UnsupportedModel, match=r"tensor nothing\.weight is missing"):
        weights.part("nothing.weight", 3, 64)


def test_tensors_that_contradict_the_metadata_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    for key, value, message in (
        (
            "feed_forward_length",
            97,
            r"tensor model.layers.0.mlp.gate_proj.weight is \[96, 64\] where the configuration asks for \[97, 64\]",
        ),
        ("attention.head_count_kv", 4, r"tensor model.layers.0.self_attn.k_proj.weight is \[32, 64\] where"),
    ):
        directory = converted(path, tiny_model("llama"), replaced={f"llama.{key}": value})
        with pytest.raises(UnsupportedModel, match=message):
            logits(directory)
        shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings", "said"), [("llama", {"hidden_act": "gelu"}, {"hidden_act": "gelu"}), (*GEMMA4, {})])
def test_transformers_code_computes_a_file_that_there_is_no_other_code_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, settings: dict[str, Any], said: dict[str, str]
) -> None:
    model = tiny_model(kind, **settings)
    directory = converted(tmp_path / "tiny.gguf", model, Kind.F32)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | said))
    with caplog.at_level(logging.WARNING, logger="chairlift"):
        runner = build_runner(EngineConfig(device="cpu", runner="torch", num_kv_blocks=20, block_size=8), directory)
    assert "transformers' code computes it, with weights dequantised to torch.float32" in caplog.text
    prompt = [token * 7 % 300 for token in range(11)]
    driver = Driver(runner)
    riding = driver.add_request(0, prompt)
    driver.step([(riding, 5)])
    driver.step([(riding, 6)])
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    assert (riding.logits[-1] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_granite_without_positions_has_the_same_logits_in_torch(tmp_path: Path) -> None:
    directory = converted(tmp_path / "tiny.gguf", tiny_model("granite"), Kind.F32, replaced={"granite.rope.scaling.finetuned": False})
    logits = []
    for settings in ({"runner": "rust", "cpu_math": "exact"}, {"runner": "torch"}):
        driver = Driver(build_runner(EngineConfig(device="cpu", num_kv_blocks=20, block_size=8, **settings), directory))
        riding = driver.add_request(0, [token * 7 % 300 for token in range(11)])
        driver.step([(riding, 11)])
        logits.append(riding.logits[-1])
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[0].abs().max()


def test_a_file_that_is_gone_or_too_short_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    directory = converted(path, tiny_model("llama"), Kind.Q8_0)
    weights = GGUFWeights(directory / LINK)
    size = path.stat().st_size
    # Shortened after its header was read: packing finds out.
    os.truncate(path, size - 100)
    entry = max(weights.tensors.entries.values(), key=lambda entry: entry.start)
    name = next(name for name, found in weights.tensors.entries.items() if found is entry)
    with pytest.raises(UnsupportedModel, match="became shorter while it was read"):
        weights.take(name, *entry.shape)
    if len(entry.shape) == 2:
        with pytest.raises(ValueError, match="became shorter while it was read"):
            _core.Linear([[weights.part(name, *entry.shape)]], entry.shape[1], "kept", threads=2)
    with pytest.raises(UnsupportedModel, match="damaged or incomplete"):
        logits(directory)
    path.unlink()
    with pytest.raises(ModelNotFound, match="is gone"):
        logits(directory)


@pytest.mark.parametrize(("memory", "dropped"), [(1 << 40, False), (0, True)])
def test_pages_of_a_file_that_does_not_fit_twice_are_dropped_once_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, dropped: bool
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("chairlift.runner.file_pages.available_memory", lambda: memory)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: calls.append((start, size)))
    directory = converted(tmp_path / "tiny.gguf", tiny_model("llama"), Kind.Q8_0)
    logits(directory)
    weights = GGUFWeights(directory / LINK)
    matrices = [(entry.start, entry.size) for entry in weights.tensors.entries.values() if len(entry.shape) == 2]
    assert sorted(calls) == (sorted(matrices) if dropped else [])
    weights.part("lm_head.weight", 320, 64)
    assert sorted(calls) == (sorted(matrices) if dropped else []), "a matrix that is not packed yet"


def test_activations_of_16_bits_change_logits_a_little_where_bytes_are_multiplied(tmp_path):
    directory = converted(tmp_path / "model.gguf", tiny_model("llama"), Kind.Q8_0)
    exact, short = (logits(directory, Precision("blocks", "none", "float32", compute)) for compute in ("float32", "int16"))
    difference = float(np.abs(exact - short).max())
    assert (difference > 0) == _core.byte_products("auto")
    assert difference < 1e-3 * np.abs(exact).max()
