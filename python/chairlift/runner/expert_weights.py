"""Reads the matrices of a mixture's experts, in each way that checkpoints store them."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from chairlift.checkpoint.safetensors_file import DTYPES, Array, as_array, as_float32
from chairlift.errors import UnsupportedModel
from chairlift.models.experts import MXFP4_BLOCKS, MXFP4_SCALES, Experts, has_matrices, whole_name
from chairlift.runner.weights import Part, Weights, in_memory, made, split_rows

MXFP4 = 39
"""ggml's number of the type."""


def gate_and_up(weights: Weights, experts: Experts, prefix: str, hidden: int) -> list[list[Part]]:
    """Returns the gate and up projections of a layer's experts, or up alone if there are no gates.

    Raises UnsupportedModel as `Weights.part` does.
    """
    names, inner = experts.names, experts.inner
    if names.both and experts.are_transposed(weights.has, prefix, hidden):
        name = prefix + names.both
        alternate, halves = (slice(0, None, 2), slice(1, None, 2)), (slice(0, inner), slice(inner, None))
        return [_columns(weights, name, experts.count, hidden, 2 * inner, rows) for rows in (alternate if names.alternating else halves)]
    if has_matrices(weights.has, prefix + names.gate_up):
        fused = _matrices(weights, prefix + names.gate_up, experts.count, 2 * inner, hidden)
        pairs = [split_rows(part, 2, hidden) for part in fused]
        return [[gate for gate, _ in pairs], [up for _, up in pairs]]
    return [_matrices(weights, prefix + name, experts.count, inner, hidden) for name in (names.gate, names.up) if name]


def down(weights: Weights, experts: Experts, prefix: str, hidden: int) -> list[Part]:
    """Returns the down projections of a layer's experts. Raises UnsupportedModel as `Weights.part` does."""
    names = experts.names
    if names.transposed and experts.are_transposed(weights.has, prefix, hidden):
        return _columns(weights, prefix + names.transposed, experts.count, experts.inner, hidden, slice(None))
    return _matrices(weights, prefix + names.down, experts.count, hidden, experts.inner)


def biases(weights: Weights, experts: Experts, prefix: str, hidden: int) -> tuple[Array, Array]:
    """Returns the biases of all gate and up projections, and of all down projections. Raises UnsupportedModel as `Weights.take` does."""
    names, count, inner = experts.names, experts.count, experts.inner
    fused = f"{prefix}{names.both}_bias"
    if weights.has(fused):
        both = as_float32(weights.take(fused, count, 2 * inner))
        second = as_float32(weights.take(f"{prefix}{names.transposed}_bias", count, hidden))
        return np.concatenate([both[:, ::2], both[:, 1::2]], 1).reshape(-1), second.reshape(-1)
    sizes = {name: inner for name in (names.gate, names.up) if name} | {names.down: hidden}
    *first, second = (as_float32(weights.take(f"{prefix}{name.replace('.{}', '')}.bias", count, size)) for name, size in sizes.items())
    return np.concatenate(first, 1).reshape(-1), second.reshape(-1)


def router(weights: Weights, experts: Experts, prefix: str, hidden: int) -> Array:
    """Returns a router's matrix, with the gate of the shared expert as its last row.

    Raises UnsupportedModel as `Weights.take` does, and for a number that is not finite.
    """
    matrices = {name: as_float32(weights.take(f"{prefix}{name}.weight", size, hidden)) for name, size in experts.router_rows.items()}
    for name, matrix in matrices.items():
        if not np.isfinite(matrix).all():
            raise UnsupportedModel(f"tensor {prefix}{name}.weight has numbers that are not finite: no expert could be chosen with it")
    return np.concatenate(list(matrices.values()))


def _columns(weights: Weights, name: str, count: int, ins: int, outs: int, columns: slice) -> list[Part]:
    """Returns the matrices of all experts [some of outs, ins], of which the checkpoint has the transposed ones, or blocks of MXFP4.

    Those of files are read one by one when they are packed.
    """
    rows = len(range(outs)[columns])
    if weights.has(name + MXFP4_BLOCKS):
        if ins % 32:
            raise UnsupportedModel(f"tensor {name}{MXFP4_BLOCKS} has rows of {ins} numbers, which are not whole blocks of 32")
        return [made(str(MXFP4), rows, partial(_mxfp4, weights, name, count, outs, ins, columns, expert)) for expert in range(count)]
    if (found := weights.find(name, count, ins, outs)) is None:
        return [in_memory(matrix.T[columns]) for matrix in weights.take(name, count, ins, outs)]
    file, stored = found

    def matrix(expert: int) -> Array:
        return as_array(file, stored, expert).T[columns]

    return [made(DTYPES[file.tensors[stored].dtype][0], rows, partial(matrix, expert)) for expert in range(count)]


def _mxfp4(weights: Weights, name: str, count: int, outs: int, ins: int, rows: slice, expert: int) -> NDArray[np.uint8]:
    """Returns some rows of an expert's matrix in MXFP4 as GGUF files have it: a block is an exponent and 16 bytes, of weights j and j + 16.

    In safetensors a byte has neighbours, the first in the lower half.
    """
    pairs = weights.packed(name + MXFP4_BLOCKS, count, outs, ins // 32, 16, index=expert)[rows]
    scales = weights.packed(name + MXFP4_SCALES, count, outs, ins // 32, index=expert)[rows]
    blocks = np.empty((*scales.shape, 17), np.uint8)
    blocks[..., 0] = scales
    codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(*scales.shape, 32)
    blocks[..., 1:] = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return blocks


def _matrices(weights: Weights, name: str, count: int, rows: int, ins: int) -> list[Part]:
    """Returns the matrices [rows, ins] of all experts, from one tensor or from one for each expert."""
    if whole := whole_name(weights.has, name):
        return split_rows(weights.part(whole, count, rows, ins), count, ins)
    return [weights.part(f"{name.format(expert)}.weight", rows, ins) for expert in range(count)]
