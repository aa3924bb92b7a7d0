import json
import math
import os
import re
import struct
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import gguf_recurrent
import numpy as np
import pytest
import torch
from gguf_files import TINY, default_file, gguf_of, split_gguf_of, tiny_model, write_safetensors
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from chairlift import _core
from chairlift.checkpoint.generation_config import recommended_sampling
from chairlift.checkpoint.gguf import BLOCK_TYPES, GGUFTensors, convert, open_gguf, read_float32
from chairlift.checkpoint.gguf_config import model_config
from chairlift.checkpoint.gguf_file import GGUFFile
from chairlift.checkpoint.gguf_keys import check_keys
from chairlift.errors import ChairliftError, UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.models.encoder import decoder_pooling
from chairlift.models.rotary import RopeConfig, Yarn
from chairlift.runner.gguf_grids import GRID_TYPES
from chairlift.tokenizer import Tokenizer

BLOCKS = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}


def _paired(weights: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp stores rotary rows: (i, i + half) side by side."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.slow
def test_weights_are_those_of_the_gguf_package(converted: Path) -> None:
    weights = load_file(converted / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    ours = {names.get_name(name.removesuffix(".weight")) + ".weight": (name, value) for name, value in weights.items()}
    reader = gguf.GGUFReader(default_file())
    assert ours.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and tensor.name.split(".")[1] not in ("0", "17", "29"):
            continue  # the package takes its time: some layers will do, and some rows of the embeddings
        name, value = ours[tensor.name]
        if ".q_proj." in name or ".k_proj." in name:
            value = _paired(value, 9 if ".q_proj." in name else 3)
        assert value.dtype == np.float32
        rows = slice(None, None, 16 if tensor.name == "token_embd.weight" else 1)
        np.testing.assert_array_equal(value[rows], gguf.dequantize(tensor.data[rows], tensor.tensor_type), strict=True)


def test_config_of_the_default_model(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    wanted = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "head_dim": 64, "vocab_size": 49152, "eos_token_id": 2}
    wanted |= {"rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    assert {key: config[key] for key in wanted} == wanted
    assert json.loads((converted / "generation_config.json").read_text()) == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [2, 0]}


@pytest.mark.slow
def test_transformers_runs_the_default_model(converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    answer = model.generate(**tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0]) == "The capital of France is Paris"


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GEMMA3_ROPES = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
GEMMA3_ROPES |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
MULTIPLIERS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.25, "logits_scaling": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 8, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen2", {}),
        ("qwen2", {"rope_parameters": {"rope_theta": 1e6, **YARN}}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 8}),
        ("gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 9, "attn_logit_softcapping": 5.0, "tie_word_embeddings": True}),
        ("gemma3_text", {"query_pre_attn_scalar": 16, "sliding_window": 9, "num_hidden_layers": 7, "tie_word_embeddings": True}),
        ("smollm3", {"num_hidden_layers": 5, "pad_token_id": 0}),
        ("granite", {**MULTIPLIERS, "tie_word_embeddings": True}),
        ("gemma3_text", {"query_pre_attn_scalar": 16, "final_logit_softcapping": 4.0, "rope_parameters": GEMMA3_ROPES}),
        ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.5, "use_qk_norm": True}),
    ],
)
@pytest.mark.slow
def test_a_model_comes_back_from_gguf_as_it_was(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """A model of transformers, written as llama.cpp's converter does and converted back, gives the same logits."""
    model = tiny_model(kind, **settings)
    gguf_of(model, tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    write_safetensors(tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(back) is type(model)
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    # Gemma's norms are 1 + weight in a file, which may take a last bit.
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-7 * ("norm" in name)) for name in before)
    ids = torch.randint(0, model.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_kinds_of_quantization(tmp_path: Path, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    model = tiny_model("qwen2")
    gguf_of(model, tmp_path / "tiny.gguf", quantization)
    weights = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    expected = gguf.dequantize(gguf.quantize(weights, quantization), quantization)
    np.testing.assert_array_equal(GGUFTensors(tmp_path / "tiny.gguf").values("model.layers.1.mlp.up_proj.weight"), expected)


@pytest.mark.parametrize(("kind", "elements", "size", "first"), [(41, 128, 18, [-1, 1, -1, -1, 1, -1, 1, 1]), (42, 64, 18, [1, -1, 0, 2])])
def test_types_of_one_and_two_bits(tmp_path: Path, kind: int, elements: int, size: int, first: list[int]) -> None:
    tensor = np.frombuffer((np.float16(0.5).tobytes() + b"\xd2" + bytes(size - 3)) * 2, np.uint8)
    path = tmp_path / "bits.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", tensor, raw_shape=(2 * size,), raw_dtype=gguf.GGMLQuantizationType.I8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # The gguf package does not write these types: the number of elements and the type are replaced.
    header = struct.pack("<QI", 2 * size, gguf.GGMLQuantizationType.I8)
    content = path.read_bytes()
    assert content.count(header) == 1
    path.write_bytes(content.replace(header, struct.pack("<QI", 2 * elements, kind)))
    file = open_gguf(path)
    values = read_float32(file, file.tensors["a"])
    np.testing.assert_array_equal(values, np.array([*first, *[-1] * (elements - len(first))] * 2) / 2)


def test_two_conversions_at_once_agree(tmp_path: Path) -> None:
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf")
    barrier = threading.Barrier(4)
    failures = []

    def run() -> None:
        barrier.wait()
        try:
            convert(tmp_path / "tiny.gguf", tmp_path / "cache" / "out")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["out"]
    Tokenizer(tmp_path / "cache" / "out")


def test_a_tokenizer_beside_the_file_is_taken(tmp_path: Path, converted: Path) -> None:
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf", tokenizer="unheard-of")
    with pytest.raises(UnsupportedModel, match=r"put the model's own tokenizer\.json beside the file"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
    (tmp_path / "tokenizer.json").write_bytes((converted / "tokenizer.json").read_bytes())
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert Tokenizer(tmp_path / "out").vocab_size == 49152


def _altered(tmp_path: Path, **metadata: Any) -> Path:
    """A tiny model with some of its metadata replaced; None leaves a key out."""
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("llama"), path, replaced={key.replace("__", "."): value for key, value in metadata.items()})
    return path


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba'; those that can be read: llama, mistral3, qwen2, qwen2vl, qwen3"),
        ({"llama__expert_count": 8}, "llama.expert_used_count is None, not a positive integer"),
        ({"split__count": 3}, "is one part of 3: name the first, whose name ends with -00001-of-00003.gguf"),
        ({"llama__attention__clamp_kqv": 8.0}, "llama.attention.clamp_kqv is 8.0, which the code for this architecture cannot compute"),
        ({"llama__expert_used_count": 2}, "llama.expert_used_count is 2, which"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale is 0.5, which"),
        ({"llama__attention__causal": False}, "llama.attention.causal is False, which"),
        ({"llama__block_count": None}, "llama.block_count is None"),
        ({"llama__block_count": 2**31 - 1}, "says it has 2147483647 layers, and holds 21 tensors"),
        ({"llama__block_count": 3}, "says it has 3 layers, and holds tensors of 2"),
        ({"llama__nextn_predict_layers": 2}, "llama.nextn_predict_layers is 2, and there are 2 layers in all"),
        (
            {"llama__block_count": 2**31 - 1, "llama__nextn_predict_layers": 2**31 - 3},
            "says it has 2147483647 layers, and holds 21 tensors",
        ),
        ({"llama__block_count": "two"}, "llama.block_count is 'two' and not of type int"),
        ({"llama__block_count": 1}, "says it has 1 layers, and holds tensors of 2"),
        ({"llama__attention__head_count": 0}, "llama.attention.head_count is 0, not a positive integer"),
        ({"llama__rope__dimension_count": 4}, "rotary or value dimensions"),
        ({"llama__rope__freq_base": float("nan")}, "freq_base is nan"),
        ({"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}, "rope scaling of type 'longrope' needs tensors"),
        ({"llama__rope__scaling__type": "spiral", "llama__rope__scaling__factor": 2.0}, "rope scaling of type 'spiral' cannot be read"),
        ({"llama__rope__scaling__attn_factor": 1.5}, "llama.rope.scaling.attn_factor is 1.5, which can be read with factors of yarn"),
        ({"llama__rope__scaling__yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor is 0.5, which"),
        ({"general__alignment": 0}, "alignment is 0"),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "vocabulary is missing or contradicts itself"),
        ({"tokenizer__ggml__tokens": 7}, "tokenizer.ggml.tokens is 7 and not of type list"),
        ({"llama__attention__sliding_window": 64}, "llama.attention.sliding_window is 64, which"),
        ({"tokenizer__ggml__merges": None}, "it lists no merges"),
        ({"tokenizer__ggml__merges": ["nospace"]}, "its vocabulary is not sound"),
        ({"tokenizer__ggml__merges": ["x y z"]}, "its vocabulary is not sound"),
        ({"tokenizer__ggml__pre": "tomorrow"}, "of the kind 'gpt2' / 'tomorrow'"),
        ({"tokenizer__ggml__model": "rwkv"}, "of the kind 'rwkv'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, metadata: dict[str, Any], reason: str) -> None:
    path = _altered(tmp_path, **metadata)
    with pytest.raises(UnsupportedModel, match=reason):
        convert(path, tmp_path / "out")
    assert [left.name for left in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.head_count_kv", [2, 2], "head_count_kv must be one positive number, or one for each of 5 layers, got"),
        ("attention.head_count_kv", [2, 1, 2, 2, 2], "KV heads or inner sizes by layer are not those of Gemma 4"),
        ("feed_forward_length", [96, 96, 96, 96, 192], "KV heads or inner sizes by layer are not those of Gemma 4"),
        ("attention.sliding_window_pattern", [True, False], "has 2 entries for 5 layers"),
        ("attention.sliding_window_pattern", [True, True, True, True, False], "no earlier layer has full attention"),
        ("rope.dimension_count_swa", 8, "rope.dimension_count_swa differs from the size of a head, 16"),
        ("attention.shared_kv_layers", 9, "KV heads or inner sizes by layer are not those of Gemma 4"),
    ],
)
@pytest.mark.slow
def test_lists_by_layer_that_do_not_fit_are_refused(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    (settings, *_) = (settings for kind, settings in TINY if kind == "gemma4_text")
    gguf_of(tiny_model("gemma4_text", **settings), tmp_path / "tiny.gguf", replaced={f"gemma4.{key}": value})

    def load() -> None:
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
        ModelConfig.load(tmp_path / "out")

    with pytest.raises(UnsupportedModel, match=reason):
        load()


@pytest.mark.parametrize(("key", "same"), [("feed_forward_length", 96), ("attention__head_count", 4), ("attention__head_count_kv", 2)])
def test_a_list_by_layer_needs_an_architecture_whose_layers_differ(tmp_path: Path, key: str, same: int) -> None:
    convert(_altered(tmp_path, **{f"llama__{key}": [same, same]}), tmp_path / "same")
    path = _altered(tmp_path, **{f"llama__{key}": [same, same // 2]})
    name = re.escape(key.replace("__", "."))
    message = rf"llama\.{name} differs by layer, which cannot be read for the architecture 'llama'"
    with pytest.raises(UnsupportedModel, match=message):
        convert(path, tmp_path / "out")


def test_layers_without_attention_may_have_no_heads(tmp_path: Path) -> None:
    path, model = tmp_path / "tiny.gguf", gguf_recurrent.tiny_model("lfm2")
    gguf_recurrent.write(model, path, replaced={"attention.head_count": [0, 4, 0]})
    convert(path, tmp_path / "out")
    assert ModelConfig.load(tmp_path / "out").num_heads == model.config.num_attention_heads == 4
    gguf_recurrent.write(model, path, replaced={"attention.head_count": [0, 0, 0]})
    with pytest.raises(UnsupportedModel, match=r"lfm2\.attention\.head_count is 0 for all layers"):
        convert(path, tmp_path / "other")


@pytest.mark.parametrize("kind", ["granitemoehybrid_dense", "nemotron_h"])
@pytest.mark.parametrize("switch", [True, False, None])
def test_rotary_positions_are_switched_off_as_in_llama_cpp(tmp_path: Path, kind: str, switch: bool | None) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_recurrent.write(gguf_recurrent.rounded_model(kind), path, replaced={"rope.scaling.finetuned": switch, "attention.scale": None})
    config = ModelConfig.parse(model_config(GGUFFile(path, BLOCKS.get)))
    assert any(config.uses_rope) == (switch is not False and kind.startswith("granite"))
    assert config.scales.attention == config.head_dim**-0.5


def test_experts_of_trinity_are_weighted_as_the_file_says(tmp_path: Path) -> None:
    (settings, *_) = (settings for kind, settings in TINY if kind == "afmoe")
    for said in (True, False):
        gguf_of(tiny_model("afmoe", **settings), tmp_path / "tiny.gguf", replaced={"afmoe.expert_weights_norm": said})
        experts = ModelConfig.parse(model_config(GGUFFile(tmp_path / "tiny.gguf", BLOCKS.get))).experts
        assert experts is not None
        assert experts.normalised == said


def _keys_of_the_package(kinds: Any) -> list[str]:
    """All metadata keys that the gguf package knows, for the architecture llama."""
    found: list[str] = []
    for name, value in vars(kinds).items():
        if isinstance(value, type):
            found += _keys_of_the_package(value)
        elif isinstance(value, str) and not name.startswith("_"):
            found.append(re.sub(r"\{\w+\}", "0", value.replace("{arch}", "llama")))
    return found


def test_each_key_is_used_or_changes_nothing_or_is_reported(tmp_path: Path) -> None:
    """Every key that the gguf package knows, with a value that is not neutral, one after the other."""
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("llama"), path)
    file = GGUFFile(path, BLOCKS.get)
    model_config(file)
    assert check_keys(path, file.unread(), 16, 128) == []
    outcomes = Counter[str]()
    for key in sorted({*_keys_of_the_package(gguf.constants.Keys), "llama.made_up"}):
        if file.value(key) is not None:
            continue
        try:
            outcomes["reported" if check_keys(path, {key: 7}, 16, 128) else "fine"] += 1
        except UnsupportedModel:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 60
    assert outcomes["reported"] > 20
    neutral = {
        "llama.expert_count": 0,
        "llama.attention.scale": 0.25,
        "llama.rope.scaling.attn_factor": 1.0,
        "llama.attention.causal": True,
        "llama.attention.key_length_swa": 16,
        **dict.fromkeys(("llama.expert_group_count", "llama.expert_group_used_count", "llama.interleave_moe_layer_step"), 1),
        **dict.fromkeys(("llama.moe_every_n_layers", "llama.num_loops"), 1),
    }
    assert check_keys(path, neutral | {"llama.made_up": 7, "llama.attention.sliding_window": 4096}, 16, 128) == ["llama.made_up"]


def test_sections_of_positions_are_read_where_they_leave_rows_in_their_order(tmp_path: Path) -> None:
    """llama.cpp's converter reorders the rows of queries and keys of GLM-4.1V, and not of GLM-4.5V."""
    settings = dict(TINY)
    for kind, name in (("glm4", "glm4"), ("glm4_moe", "glm4moe")):
        key = f"{name}.rope.dimension_sections"
        gguf_of(tiny_model(kind, **settings[kind]), tmp_path / f"{kind}.gguf", replaced={key: [2, 1, 1, 0]})
    convert(tmp_path / "glm4_moe.gguf", tmp_path / "out")
    reason = "glm4.rope.dimension_sections is [2, 1, 1, 0], which the code for this architecture cannot compute"
    with pytest.raises(UnsupportedModel, match=re.escape(reason)):
        convert(tmp_path / "glm4.gguf", tmp_path / "other")


def test_an_unknown_key_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    convert(_altered(tmp_path, llama__made_up=7, llama__pooling_type=3), tmp_path / "out")
    assert "tiny.gguf has metadata that is not known here and not used: llama.made_up\n" in caplog.text


def test_what_the_tokenizer_does_not_use_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = {"tokenizer__ggml__normalizer__lowercase": True, "tokenizer__ggml__remove_extra_whitespaces": True}
    convert(_altered(tmp_path, tokenizer__ggml__made_up=7, tokenizer__ggml__suppress_tokens=[1], **rules), tmp_path / "out")
    names = ("normalizer.lowercase", "remove_extra_whitespaces", "made_up")
    reported = caplog.text.partition("not known here and not used: ")[2].strip()
    assert set(reported.split(", ")) == {f"tokenizer.ggml.{name}" for name in names}


def test_recommended_sampling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"temp": 0.7, "top_k": 1, "top_p": 0.9, "min_p": 0.05, "penalty_repeat": 1.1}
    path = _altered(tmp_path, **{f"general__sampling__{name}": value for name, value in settings.items()}, general__sampling__mirostat=2)
    convert(path, tmp_path / "out")
    assert recommended_sampling(tmp_path / "out") == {
        **{"temperature": 0.7, "top_k": 1, "top_p": 0.9, "min_p": 0.05},
        "repetition_penalty": 1.1,
    }
    assert "recommends sampling with mirostat, which is not supported" in caplog.text
    convert(path, tmp_path / "other", {"temperature": 0.2})
    assert recommended_sampling(tmp_path / "other")["temperature"] == 0.2


@pytest.mark.parametrize(("number", "pooling"), [(None, "last"), (0, "last"), (1, None), (3, "last"), (4, None)])
def test_pooling(tmp_path: Path, number: int | None, pooling: str | None) -> None:
    convert(_altered(tmp_path, llama__pooling_type=number), tmp_path / "out")
    assert decoder_pooling(tmp_path / "out") == pooling


def test_a_split_file_holds_the_tensors_of_all_parts(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    gguf_of(model, tmp_path / "whole.gguf")
    parts = split_gguf_of(model, tmp_path / "m" / "tiny.gguf", 6)
    whole, split = GGUFTensors(tmp_path / "whole.gguf"), GGUFTensors(parts[0])
    assert whole.entries.keys() == split.entries.keys()
    assert {entry.file for entry in split.entries.values()} == {*parts[1:]} | {
        path for path in parts[:1] if GGUFFile(path, BLOCKS.get).tensors
    }
    for name in whole.entries:
        np.testing.assert_array_equal(whole.values(name), split.values(name), strict=True)


def test_damaged_sets_of_parts_are_refused(tmp_path: Path) -> None:
    parts = split_gguf_of(tiny_model("qwen2"), tmp_path / "m" / "tiny.gguf", 6)
    second = parts[1].read_bytes()
    for content, reason in (
        (parts[2].read_bytes(), "is not part 2 of"),
        (second[: len(second) // 2], "damaged or incomplete"),
        (None, "is missing: the model has"),
    ):
        parts[1].unlink()
        if content is not None:
            parts[1].write_bytes(content)
        with pytest.raises(UnsupportedModel, match=reason):
            GGUFTensors(parts[0])


@pytest.mark.parametrize(
    ("divisors", "reason"),
    [
        (np.linspace(1, 3, 8, dtype=np.float32), None),
        (np.array([1, 2, 0, 1, 1, 1, 1, 1], np.float32), "rope_freqs.weight must hold positive numbers"),
        (np.ones(8, np.float16), "rope_freqs.weight must be a vector of type F32"),
        (np.ones(7, np.float32), "short_factor must be 8 positive numbers"),
    ],
)
def test_divisors_of_frequencies_are_used_or_refused(tmp_path: Path, divisors: np.ndarray, reason: str | None) -> None:
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf", frequencies=divisors)

    def load() -> RopeConfig:
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
        return ModelConfig.load(tmp_path / "out").rope

    if reason is None:
        rope = load()
        np.testing.assert_array_equal(rope.frequencies(128), RopeConfig(dim=16).frequencies(128) / divisors)
        assert (rope.scale, rope.depends_on_length) == (1.0, False)
        return
    with pytest.raises(UnsupportedModel, match=reason):
        load()


@pytest.mark.parametrize(
    ("metadata", "scale"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"original_context_length": None}, 0.1 * math.log(4) + 1),  # as in llama.cpp, that of the model
        ({"yarn_log_multiplier": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"attn_factor": 1.25}, 1.25 * (0.1 * math.log(4) + 1)),
        ({"yarn_attn_factor": 1.5, "attn_factor": 2.0}, 3.0),
    ],
)
def test_yarn_of_a_file(tmp_path: Path, metadata: dict[str, float], scale: float) -> None:
    values = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0, "yarn_beta_slow": 0.5, **metadata}
    replaced = {f"llama.rope.scaling.{key}": value for key, value in values.items()}
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf", replaced=replaced | {"llama.context_length": 32})
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    rope = ModelConfig.load(tmp_path / "out").rope
    assert rope.scaling == Yarn(4.0, 32, 16.0, 0.5)
    assert rope.scale == pytest.approx(scale, rel=1e-6)


def test_a_file_that_says_that_its_context_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gguf_of(tiny_model("llama"), tmp_path / "tiny.gguf", replaced={"llama.context_length": 0})
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert ModelConfig.load(tmp_path / "out").max_position_embeddings == 4096
    assert "tiny.gguf says that its context length is 0: taking 4096 tokens" in caplog.text


@pytest.mark.parametrize("content", [b"", b"GGU", b"\0" * 64, b"PK\3\4" + b"\0" * 64])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match="is not a GGUF file"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(("version", "reason"), [(1, "version 1; versions 2 and 3"), (3 << 24, "big-endian")])
def test_other_versions_are_refused(tmp_path: Path, version: int, reason: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + b"\0" * 64)
    with pytest.raises(UnsupportedModel, match=reason):
        convert(path, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ((0, 32), None),
        ((0, 0), "tensor b begins at byte 0 of the data, and the one before it ends at 32"),
        ((0, 64), "tensor b begins at byte 64 of the data, and the one before it ends at 32"),
        ((0, 33), "tensor b begins at byte 33 of the data"),
        ((32, 0), "tensor a begins at byte 32 of the data, and the one before it ends at 0"),
        ((0, 2**63), "tensor b begins at byte"),
    ],
)
def test_tensors_follow_each_other(tmp_path: Path, offsets: tuple[int, int], reason: str | None) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
    for name, offset in zip(("a", "b"), offsets, strict=True):
        header += struct.pack("<Q", 1) + name.encode() + struct.pack("<IQIQ", 1, 8, 0, offset)
    path = tmp_path / "two.gguf"
    path.write_bytes(header.ljust(-(-len(header) // 32) * 32, b"\0") + bytes(128))
    if reason is None:
        assert [entry.size for entry in GGUFFile(path, BLOCKS.get).tensors.values()] == [32, 32]
        return
    with pytest.raises(UnsupportedModel, match=f"damaged or incomplete: {reason}"):
        GGUFFile(path, BLOCKS.get)


def _header(num_tensors: int, *values: bytes) -> bytes:
    """The first bytes of a file with so many tensors, and a value of an odd key for each of `values`: its type and its content."""
    keys = b"".join(struct.pack("<Q", 3) + b"k.%d" % number + value for number, value in enumerate(values))
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(values)) + keys


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IQ", 8, 800_000_000),
        struct.pack("<IQ", 8, 2_500_000_000),
        struct.pack("<IIQ", 9, 0, 300_000_000),
        struct.pack("<IIQ", 9, 8, 300_000_000),
        struct.pack("<IIQQ", 9, 8, 2, 800_000_000),
    ],
    ids=["text", "longer text", "numbers", "texts", "text of a list"],
)
@pytest.mark.parametrize("vocabulary", [True, False])
def test_a_damaged_length_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: bytes, vocabulary: bool) -> None:
    path, pread = tmp_path / "sparse.gguf", os.pread

    def read(file: int, size: int, at: int) -> bytes:
        assert size <= 1 << 27
        return pread(file, size, at)

    path.write_bytes(_header(1, value))
    os.truncate(path, 5_000_000_000)
    monkeypatch.setattr(os, "pread", read)
    with pytest.raises(UnsupportedModel, match=r"damaged or incomplete: (a list of|\d+ bytes at byte \d+ of a header of at most)"):
        GGUFFile(path, BLOCKS.get, vocabulary=vocabulary)


@pytest.mark.parametrize(("kind", "instead"), [(31, "Q4_0"), (33, "Q4_0"), (36, "IQ4_NL")])
def test_a_type_that_was_removed_from_ggml_is_refused_with_the_one_to_take(tmp_path: Path, kind: int, instead: str) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(_header(1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 256, kind, 0) + bytes(256))
    with pytest.raises(
        UnsupportedModel, match=rf"tensor a is of a type that was removed from ggml \({kind}\): take the file of type {instead}$"
    ):
        GGUFFile(path, BLOCKS.get)


@pytest.mark.parametrize("name", ["blk.0\n.weight", "a" * 201])
def test_odd_names_of_tensors_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, len(name)) + name.encode() + struct.pack("<IQIQ", 1, 8, 0, 0) + bytes(128))
    with pytest.raises(UnsupportedModel, match="damaged or incomplete: the name '"):
        GGUFFile(path, BLOCKS.get)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), whole)
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    assert GGUFFile(whole, BLOCKS.get, vocabulary=False).tensors == GGUFFile(whole, BLOCKS.get).tensors
    for size in (*range(4, 400), *range(400, len(content), 997), len(content) - 32):
        cut.write_bytes(content[:size])
        for vocabulary in (True, False):
            with pytest.raises(UnsupportedModel, match="damaged or incomplete"):
                GGUFFile(cut, BLOCKS.get, vocabulary=vocabulary)
    with pytest.raises(UnsupportedModel, match="damaged or incomplete"):
        convert(cut, tmp_path / "out")
    assert sorted(left.name for left in tmp_path.iterdir()) == ["cut.gguf", "tiny.gguf"]


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("qwen2"), path)
    tensors = GGUFTensors(path)
    last = max(tensors.entries, key=lambda name: tensors.entries[name].start)
    os.truncate(path, tensors.entries[last].start + 1)
    with pytest.raises(UnsupportedModel, match="became shorter while it was read"):
        tensors.values(last)


def test_flipped_bytes_do_no_harm(tmp_path: Path) -> None:
    """Whatever a header claims, reading it ends in a model or in one of our errors, and in no huge allocation."""
    whole = tmp_path / "tiny.gguf"
    gguf_of(tiny_model("llama"), whole)
    content = bytearray(whole.read_bytes())
    header = GGUFFile(whole, BLOCKS.get).tensors["token_embd.weight"].start
    damaged = tmp_path / "damaged.gguf"
    random = np.random.default_rng(0)
    refused = 0
    for turn in range(300):
        copy = bytearray(content)
        for at in random.integers(4, header, 1 + turn % 3):
            copy[at] = random.integers(256)
        damaged.write_bytes(copy)
        try:
            convert(damaged, tmp_path / "out" / str(turn))
        except ChairliftError:
            refused += 1
    assert refused > 50
    assert all(not left.name.startswith(".") for left in (tmp_path / "out").iterdir())


def test_the_table_of_types_is_that_of_the_gguf_package_and_of_the_kernels() -> None:
    assert {kind: (gguf.GGMLQuantizationType(kind).name, *BLOCKS[kind]) for kind in BLOCK_TYPES} == BLOCK_TYPES
    assert {0, 1, 30, *_core.block_types(), *GRID_TYPES} == BLOCK_TYPES.keys()


def test_other_types_need_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    for kind in (gguf.GGMLQuantizationType.TQ2_0, gguf.GGMLQuantizationType.F16):
        gguf_of(model, tmp_path / f"{kind.name}.gguf", kind)
    monkeypatch.setitem(sys.modules, "gguf", None)
    GGUFTensors(tmp_path / "F16.gguf")
    with pytest.raises(UnsupportedModel, match="needs one more package: pip install gguf"):
        GGUFTensors(tmp_path / "TQ2_0.gguf")
