"""GGUF files with random weights: blocks of a type with fixed scales, and numbers in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Q4, Q6, Q8 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K, gguf.GGMLQuantizationType.Q8_0
MXFP4 = gguf.GGMLQuantizationType.MXFP4
SMALL, SMALLER = np.float16(1e-4).tobytes(), np.float16(2e-5).tobytes()
SCALES = {Q4: {0: SMALL, 2: SMALL}, Q6: {208: SMALLER}, Q8: {0: SMALL}, MXFP4: {0: bytes([119])}}
"""The scales of a block, by where they are. That of MXFP4 is 2 to the power of its byte less 127."""
Tensors = dict[str, tuple[tuple[int, ...], gguf.GGMLQuantizationType | None]]
"""The shape and the type of each tensor, by its whole name; None is float32."""


def attention_tensors(hidden: int, heads: tuple[int, int, int], *, gated: bool = False, norms: bool = True) -> Tensors:
    """The tensors of a layer's attention. `heads` has the number of query heads, that of KV heads, and their size."""
    queries, kv, size = heads
    found: Tensors = {
        "attn_q.weight": ((queries * size * (2 if gated else 1), hidden), Q4),
        "attn_k.weight": ((kv * size, hidden), Q4),
        "attn_v.weight": ((kv * size, hidden), Q4),
        "attn_output.weight": ((hidden, queries * size), Q4),
    }
    return found | ({"attn_q_norm.weight": ((size,), None), "attn_k_norm.weight": ((size,), None)} if norms else {})


def mlp_tensors(hidden: int, inner: int, suffix: str = "") -> Tensors:
    """The tensors of a layer's MLP, or with the suffix `_shexp` of its shared expert."""
    outs = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"ffn_{name}{suffix}.weight": (shape, Q4) for name, shape in outs.items()}


def expert_tensors(hidden: int, count: int, inner: int, down: gguf.GGMLQuantizationType = Q4) -> Tensors:
    """The tensors of a layer's experts and of their router. `down` is the type of `ffn_down_exps`."""
    found: Tensors = {f"ffn_{name}_exps.weight": ((count, inner, hidden), Q4) for name in ("gate", "up")}
    return found | {"ffn_down_exps.weight": ((count, hidden, inner), down), "ffn_gate_inp.weight": ((count, hidden), None)}


def write(path: Path, kind: str, metadata: Mapping[str, Any], tensors: Tensors) -> None:
    """Writes a file of the architecture `kind` with metadata below that name. Names of the vocabulary are numbers."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, kind)
    add: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[list] = writer.add_array
    for name, value in metadata.items():
        add[type(value)](f"{kind}.{name}", value)
    vocabulary = tensors["token_embd.weight"][0][0]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["t", "0", *(f"t{index}" for index in range(vocabulary - 2))])
    writer.add_token_types([1] * vocabulary)
    # llama.cpp refuses a vocabulary without merges.
    writer.add_token_merges(["t 0"])
    for name, (shape, block) in tensors.items():
        if block is None:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            packed = (*shape[:-1], shape[-1] // gguf.GGML_QUANT_SIZES[block][0] * gguf.GGML_QUANT_SIZES[block][1])
            writer.add_tensor_info(name, packed, np.dtype(np.uint8), int(np.prod(packed)), raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (shape, block) in tensors.items():
        writer.write_tensor_data(_blocks(random, shape, block) if block else _numbers(random, name, shape))
    writer.close()


def _numbers(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights in float32: 1 for norms, and negative rates of decay."""
    if name.endswith("ssm_a"):
        return -random.uniform(0.5, 2.0, shape).astype(np.float32)
    if len(shape) == 1 or "ssm_norm" in name:
        return np.ones(shape, np.float32)
    return random.standard_normal(shape, np.float32) * np.float32(0.02)


def _blocks(random: np.random.Generator, shape: tuple[int, ...], block: gguf.GGMLQuantizationType) -> np.ndarray:
    elements, size = gguf.GGML_QUANT_SIZES[block]
    blocks = np.frombuffer(random.bytes(int(np.prod(shape)) // elements * size), np.uint8).reshape(-1, size).copy()
    for at, scale in SCALES[block].items():
        blocks[:, at : at + len(scale)] = np.frombuffer(scale, np.uint8)
    return blocks
