"""Multiplies out quantised matrices of the formats that are not kept packed: on a CPU alone, matrix by matrix. Without torch."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from chairlift.checkpoint.safetensors_file import as_float32
from chairlift.errors import UnsupportedModel
from chairlift.models.quantization import NVFP4_GROUP, QuantizationScheme
from chairlift.runner.quantised_matrix import E4M3, Read, bytes_of, multiply_out, read_quantised

Floats = NDArray[np.float32]
Has = Callable[[str], bool]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The number of each code of four bits."""
STATE = "weight.quant_state.bitsandbytes__"
"""What begins the name of bitsandbytes' settings of a matrix, which are JSON in bytes."""
EXPANDED = (
    *("biases", "weight_global_scale", "input_global_scale", "weight_scale_2"),
    *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", f"{STATE}nf4", f"{STATE}fp4"),
)
"""Tensors of these layers that other formats lack. Scales of activations are not used."""


def expand(scheme: QuantizationScheme, read: Read, has: Has, outs: int, ins: int) -> Floats:
    """Reads a layer's matrix [outs, ins]. Raises UnsupportedModel if a tensor does not belong to the scheme."""
    if scheme.parts:
        numbers = "nvfp4" if has("weight_global_scale") or has("weight_scale_2") else "int4" if has("weight_packed") else "e4m3"
        part = next((part for part in scheme.parts if part.numbers == numbers), None)
        if part is None:
            raise UnsupportedModel(f"a matrix of {outs} rows and {ins} columns is in {numbers}, which is not in {scheme.name}")
        return expand(part, read, has, outs, ins) if part.kind else multiply_out(read_quantised(part, read, has, outs, ins))
    try:
        if scheme.kind == "nvfp4":
            return _nvfp4(read, has, outs, ins)
        if scheme.kind == "nf4":
            return _bitsandbytes(read, has, outs, ins)
        if scheme.method == "mlx":
            return _mlx(read, outs, ins)
        return _gptq(scheme, read, has, outs, ins) if scheme.method == "gptq" else _int8(scheme, read, has, outs, ins)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UnsupportedModel(f"a matrix of {outs} rows and {ins} columns cannot be read as {scheme.name} ({error!r:.100})") from None


def _nvfp4(read: Read, has: Has, outs: int, ins: int) -> Floats:
    """Codes of e2m1, the first of two in the lower half, with e4m3 scales of 16 columns.

    The factor of all scales is stored as what divides them by compressed-tensors, and as what multiplies them by ModelOpt.
    """
    pairs = read("weight_packed" if has("weight_packed") else "weight", (outs, ins // 2))
    scale = E4M3[read("weight_scale", (outs, ins // NVFP4_GROUP))]
    if has("weight_global_scale"):
        scale = scale / as_float32(read("weight_global_scale", (1,), ())).reshape(())
    else:
        scale = scale * as_float32(read("weight_scale_2", (), (1,))).reshape(())
    whole = E2M1[np.stack((pairs & 15, pairs >> 4), 2)].reshape(outs, -1, NVFP4_GROUP)
    return np.ascontiguousarray((whole * scale[..., None]).reshape(outs, ins))


def _bitsandbytes(read: Read, has: Has, outs: int, ins: int) -> Floats:
    """Codes of four bits, the first of two in the upper half, with scales of blocks of the flat matrix, which may have codes too."""
    kind = next((kind for kind in ("nf4", "fp4") if has(STATE + kind)), None)
    if kind is None:
        raise UnsupportedModel("bitsandbytes' matrices of 8 bits have no code of ours (there is for 4 bits)")
    state = json.loads(read(STATE + kind).tobytes())
    if state["shape"] != [outs, ins]:
        raise UnsupportedModel(f"a matrix of bitsandbytes is {state['shape']!r:.50} where config.json asks for {[outs, ins]}")
    scale = read("weight.absmax").reshape(-1)
    if has("weight.nested_absmax"):
        blocks = np.repeat(as_float32(read("weight.nested_absmax")), state["nested_blocksize"])[: len(scale)]
        scale = as_float32(read("weight.nested_quant_map", (256,)))[scale] * blocks + np.float32(state["nested_offset"])
    pairs = read("weight", (outs * ins // 2, 1), (1, outs * ins // 2)).reshape(-1)
    codes = np.stack((pairs >> 4, pairs & 15), 1).reshape(-1)
    whole = as_float32(read("weight.quant_map", (16,)))[codes]
    return np.ascontiguousarray((whole * np.repeat(as_float32(scale), state["blocksize"])[: whole.size]).reshape(outs, ins))


def _mlx(read: Read, outs: int, ins: int) -> Floats:
    """Integers of any bits, one after another from the lowest bit of a row on, with a scale and a bias of each group of columns."""
    words, scale, bias = read("weight"), as_float32(read("scales")), as_float32(read("biases"))
    bits = 32 * words.shape[1] // ins
    digits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=1, bitorder="little")[:, : bits * ins]
    numbers = np.packbits(digits.reshape(outs, ins, bits), axis=2, bitorder="little")[..., 0].reshape(*scale.shape, -1)
    return (numbers * scale[..., None] + bias[..., None]).reshape(outs, ins)


def _int8(scheme: QuantizationScheme, read: Read, has: Has, outs: int, ins: int) -> Floats:
    """Integers of 8 bits of compressed-tensors, stored plainly or plus 128 in words of four, with a scale per matrix, row or group."""
    if has("weight_zero_point"):
        raise UnsupportedModel("integers of 8 bits with zeros have no code of ours")
    if has("weight_packed"):
        numbers = bytes_of(read("weight_packed", (outs, ins // 4))).astype(np.float32) - np.float32(128)
    else:
        numbers = read("weight", (outs, ins)).astype(np.float32)
    groups = -(-ins // scheme.group) if scheme.group else 1
    scale = as_float32(read("weight_scale", (outs, groups), (1,), (), (outs,)))
    scale = scale.reshape(-1, groups) if scale.size > 1 else np.full((outs, 1), scale.reshape(()))
    return numbers * (np.repeat(scale, scheme.group, 1)[:, :ins] if scheme.group else scale)


def _gptq(scheme: QuantizationScheme, read: Read, has: Has, outs: int, ins: int) -> Floats:
    """GPTQ's integers of 8 bits, four to a word along the columns, and zeros along the rows."""
    groups = -(-ins // scheme.group) if scheme.group else 1
    numbers = bytes_of(read("qweight", (ins // 4, outs)).T)
    zeros = bytes_of(read("qzeros", (groups, outs // 4))) + np.uint8(scheme.zero_offset)  # 255 is stored for a zero of 0
    scale = as_float32(read("scales", (groups, outs)))
    of = read("g_idx", (ins,)) if has("g_idx") else np.arange(ins) // (scheme.group or ins)
    return (numbers.astype(np.float32) - zeros[of].T.astype(np.float32)) * scale[of].T
