"""Reads quantised matrices of safetensors checkpoints into one layout. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chairlift.checkpoint.safetensors_file import Array, as_float32
from chairlift.errors import UnsupportedModel
from chairlift.models.quantization import QuantizationScheme

Bytes = NDArray[np.uint8]
Read = Callable[..., Array]
"""read(kind, *shapes): a layer's tensor of that name, which has one of these shapes, if any are named. Raises UnsupportedModel."""
TENSORS = (
    *("weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale"),
    *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("qweight", "qzeros", "scales", "g_idx"),
)
"""A quantised layer's tensors. Scales of activations are not used, nor are groups that the columns' order tells."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's column in each place of a word."""


class QuantisedMatrix(NamedTuple):
    """A matrix (numbers - zero) * scale, as `layers.linear.Quantised` has it; numbers without zeros are e4m3.

    `numbers` is [rows, columns], or [rows, columns / 2] with zeros; `scale` is [rows, groups] in the checkpoint's dtype; `order` is int64.
    """

    numbers: Bytes
    scale: Array
    zero: Bytes | None
    group: int
    order: NDArray[np.int64] | None = None


def read_quantised(scheme: QuantizationScheme, read: Read, has: Callable[[str], bool], outs: int, ins: int) -> QuantisedMatrix:
    """Reads a layer's matrix [outs, ins]. Raises UnsupportedModel if a tensor does not belong to the scheme."""
    if scheme.bits == 8:
        return _e4m3(scheme, read, has, outs, ins)
    groups = -(-ins // scheme.group) if scheme.group else 1
    if ins % 8 or outs % 8:
        raise UnsupportedModel(f"a matrix of {outs} rows and {ins} columns cannot be of 4 bits: both must be multiples of 8")
    if scheme.method == "compressed-tensors":
        numbers = bytes_of(read("weight_packed", (outs, ins // 8)))
        zero = _integers(read("weight_zero_point", (outs // 8, groups)).T).T if has("weight_zero_point") else None
        scale = read("weight_scale", (outs, groups))
        zero = np.full(scale.shape, 8, np.uint8) if zero is None else np.ascontiguousarray(zero)
        return QuantisedMatrix(numbers, scale, zero, scheme.group)
    scale, zeros, order = read("scales", (groups, outs)), _integers(read("qzeros", (groups, outs // 8))), None
    if scheme.method == "awq":
        numbers = _awq_pairs(read("qweight", (ins, outs // 8)))
        zero = _awq_columns(zeros).T
    else:
        numbers = bytes_of(read("qweight", (ins // 8, outs)).T)
        order = _group_order(read("g_idx", (ins,)), scheme.group) if has("g_idx") else None
        if order is not None:
            numbers = _ordered(numbers, order)
        # A zero of 0 is stored as 15.
        zero = zeros.T + np.uint8(scheme.zero_offset) & np.uint8(15)
    return QuantisedMatrix(numbers, np.ascontiguousarray(scale.T), np.ascontiguousarray(zero), scheme.group, order)


def multiply_out(matrix: QuantisedMatrix) -> NDArray[np.float32]:
    """The matrix in fp32."""
    numbers, scale, zero, group, order = matrix
    columns = numbers.shape[1] * (1 if zero is None else 2)

    def per_column(x: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(x, group, 1)[:, :columns] if group else x

    if zero is None:
        whole = E4M3[numbers]
    else:
        whole = np.stack((numbers & 15, numbers >> 4), 2).reshape(-1, columns).astype(np.float32)
        whole -= per_column(zero)
    whole *= per_column(as_float32(scale))
    if order is None:
        return whole
    found = np.empty_like(whole)
    found[:, order] = whole
    return found


def _e4m3(scheme: QuantizationScheme, read: Read, has: Callable[[str], bool], outs: int, ins: int) -> QuantisedMatrix:
    blocks = (-(-outs // scheme.block_rows), -(-ins // scheme.group) if scheme.group else 1)
    # DeepSeek's name for it; it is no inverse.
    name = "weight_scale_inv" if has("weight_scale_inv") else "weight_scale"
    scale = read(name, blocks) if scheme.group else read(name, (), (1,), (1, 1), (outs,), (outs, 1))
    rows = np.repeat(scale, scheme.block_rows, 0)[:outs] if scheme.group else np.repeat(scale.reshape(-1, 1), outs // scale.size, 0)
    return QuantisedMatrix(read("weight", (outs, ins)), rows, None, scheme.group)


def bytes_of(words: Array) -> Bytes:
    """The bytes of 32-bit words, the lowest first: numbers of a row, of which the first ones are in the lowest bits."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)


def _integers(words: Array) -> Bytes:
    """The 4-bit integers of a matrix of words, in the order of their bits."""
    pairs = bytes_of(words)
    return np.stack((pairs & 15, pairs >> 4), 2).reshape(len(pairs), -1)


def _awq_columns(integers: Bytes) -> Bytes:
    """Undoes AWQ's order of columns."""
    ordered = np.empty_like(integers)
    for index, column in enumerate(AWQ_ORDER):
        ordered[:, column::8] = integers[:, index::8]
    return ordered


def _awq_pairs(words: Array) -> Bytes:
    """Pairs of a row's neighbours [outs, ins / 2] from AWQ's words [ins, outs / 8], which have eight rows each."""
    first, second = (bytes_of(words[start::2]) for start in (0, 1))
    # The two integers of a byte are of different rows.
    rows = (first & 15) | (second << 4), (first >> 4) | (second & 240)
    pairs = np.empty((8 * words.shape[1], len(words) // 2), np.uint8)
    for index, row in enumerate(AWQ_ORDER):
        pairs[row::8] = rows[index % 2][:, index // 2 :: 4].T
    return pairs


def _group_order(indices: Array, group: int) -> NDArray[np.int64] | None:
    """The order of columns in which GPTQ's groups (`desc_act`) are of neighbours; None if they are already. Raises UnsupportedModel."""
    columns = np.arange(len(indices))
    expected = columns // group if group else 0 * columns
    order = np.argsort(indices, kind="stable")
    if not np.array_equal(indices[order], expected):
        raise UnsupportedModel(f"g_idx of this GPTQ checkpoint does not have groups of {group or len(indices)} columns: it is damaged")
    return None if np.array_equal(order, columns) else order


def _ordered(pairs: Bytes, order: NDArray[np.int64]) -> Bytes:
    """Pairs of 4-bit integers with their columns in another order."""
    integers: Bytes = np.stack((pairs & 15, pairs >> 4), 2).reshape(len(pairs), -1)[:, order]
    ordered: Bytes = integers[:, ::2] | integers[:, 1::2] << np.uint8(4)
    return ordered


def _e4m3_table() -> NDArray[np.float32]:
    """The number of each byte, after the FP8 formats of Micikevicius et al. (2022)."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[bits & 127 == 127] = np.nan
    return np.where(bits < 128, size, -size).astype(np.float32)


E4M3 = _e4m3_table()
