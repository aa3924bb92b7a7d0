"""Reads the matrices of a mixture's experts, in each way that checkpoints store them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chairlift.checkpoint.safetensors_file import Array, as_float32
from chairlift.errors import UnsupportedModel
from chairlift.models.experts import MXFP4_BLOCKS, MXFP4_SCALES, Experts
from chairlift.runner.weights import Part, Weights, in_memory, split_rows

MXFP4 = 39
"""ggml's number of the type."""


def gate_and_up(weights: Weights, experts: Experts, prefix: str, hidden: int) -> list[list[Part]]:
    """Returns the gate and up projections of a layer's experts, or up alone if there are no gates.

    Raises UnsupportedModel as `Weights.part` does.
    """
    names, inner = experts.names, experts.inner
    if names.interleaved and weights.has(prefix + names.interleaved + MXFP4_BLOCKS):
        blocks = _mxfp4(weights, prefix + names.interleaved, experts.count, 2 * inner, hidden)
        return [[_in_blocks(one[first::2]) for one in blocks] for first in (0, 1)]
    if names.interleaved and weights.has(prefix + names.interleaved):
        both = _transposed(weights, prefix + names.interleaved, experts.count, hidden, 2 * inner)
        return [[in_memory(one[first::2]) for one in both] for first in (0, 1)]
    if _has(weights, prefix + names.gate_up):
        fused = _matrices(weights, prefix + names.gate_up, experts.count, 2 * inner, hidden)
        halves = [split_rows(part, 2, hidden) for part in fused]
        return [[gate for gate, _ in halves], [up for _, up in halves]]
    return [_matrices(weights, prefix + name, experts.count, inner, hidden) for name in (names.gate, names.up) if name]


def down(weights: Weights, experts: Experts, prefix: str, hidden: int) -> list[Part]:
    """Returns the down projections of a layer's experts. Raises UnsupportedModel as `Weights.part` does."""
    names = experts.names
    if names.transposed and weights.has(prefix + names.transposed + MXFP4_BLOCKS):
        return list(map(_in_blocks, _mxfp4(weights, prefix + names.transposed, experts.count, hidden, experts.inner)))
    if names.transposed and weights.has(prefix + names.transposed):
        return list(map(in_memory, _transposed(weights, prefix + names.transposed, experts.count, experts.inner, hidden)))
    return _matrices(weights, prefix + names.down, experts.count, hidden, experts.inner)


def biases(weights: Weights, experts: Experts, prefix: str, hidden: int) -> tuple[Array, Array]:
    """Returns the biases of all gate and up projections, and of all down projections. Raises UnsupportedModel as `Weights.take` does."""
    names, count, inner = experts.names, experts.count, experts.inner
    fused = f"{prefix}{names.interleaved}_bias"
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


def _mxfp4(weights: Weights, name: str, count: int, rows: int, ins: int) -> NDArray[np.uint8]:
    """Returns matrices in MXFP4 as GGUF files have them: a block is an exponent and 16 bytes, which have weights j and j + 16.

    In safetensors a byte has neighbours, the first in the lower half.
    """
    if ins % 32:
        raise UnsupportedModel(f"tensor {name}{MXFP4_BLOCKS} has rows of {ins} numbers, which are not whole blocks of 32")
    pairs = weights.packed(name + MXFP4_BLOCKS, count, rows, ins // 32, 16)
    blocks = np.empty((*pairs.shape[:-1], 17), np.uint8)
    blocks[..., 0] = weights.packed(name + MXFP4_SCALES, count, rows, ins // 32)
    for block, pair in zip(blocks, pairs, strict=True):  # expert by expert: the codes take twice the memory
        codes = np.stack((pair & 15, pair >> 4), -1).reshape(*pair.shape[:-1], 32)
        block[..., 1:] = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return blocks


def _in_blocks(blocks: NDArray[np.uint8]) -> Part:
    """Returns a matrix of blocks of MXFP4 for the CPU kernels."""
    return str(MXFP4), len(blocks), np.ascontiguousarray(blocks).reshape(-1), 0


def _transposed(weights: Weights, name: str, count: int, ins: int, outs: int) -> Array:
    """Returns matrices [outs, ins] of all experts, which are stored as [ins, outs]."""
    return as_float32(weights.take(name, count, ins, outs)).transpose(0, 2, 1)


def _whole(weights: Weights, name: str) -> str | None:
    """Returns the name of the tensor of all experts, if there is one."""
    name = name.replace(".{}", "")
    return next((whole for whole in (f"{name}.weight", name) if weights.has(whole)), None)


def _has(weights: Weights, name: str) -> bool:
    return _whole(weights, name) is not None or weights.has(f"{name.format(0)}.weight")


def _matrices(weights: Weights, name: str, count: int, rows: int, ins: int) -> list[Part]:
    """Returns the matrices [rows, ins] of all experts, from one tensor or from one for each expert."""
    if whole := _whole(weights, name):
        return split_rows(weights.part(whole, count, rows, ins), count, ins)
    return [weights.part(f"{name.format(expert)}.weight", rows, ins) for expert in range(count)]
