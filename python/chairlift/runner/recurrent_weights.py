"""Reads the tensors of recurrent layers, in each way that checkpoints store them."""

from __future__ import annotations

import numpy as np

from chairlift import _core
from chairlift.architectures import RecurrentKind
from chairlift.checkpoint.safetensors_file import Array, as_float32
from chairlift.errors import UnsupportedModel
from chairlift.models.recurrence import RecurrentLayers
from chairlift.runner.weights import Part, Weights, in_memory, slices


def projections(weights: Weights, layers: RecurrentLayers, prefix: str) -> list[Part]:
    """Returns the matrices whose rows are the projections of a layer's input, in the order of the kernels.

    Raises UnsupportedModel as `Weights.part` does.
    """
    prefix += layers.names.prefix
    if layers.names.kind is not RecurrentKind.DELTA:
        return [weights.part(f"{prefix}{name}.weight", layers.projected, layers.hidden) for name in layers.names.projections]
    keys, values, hidden = layers.groups * layers.key_size, layers.width, layers.hidden
    if weights.has(f"{prefix}in_proj_qkvz.weight"):
        # For each key: query, key, values of its heads, and their gates.
        both = layers.count // layers.groups * layers.value_size
        whole = weights.part(f"{prefix}in_proj_qkvz.weight", 2 * keys + 2 * values, hidden)
        pieces = slices(whole, [layers.key_size, layers.key_size, both, both] * layers.groups, hidden)
        matrices = [piece for kind in range(4) for piece in pieces[kind::4]]
    else:
        sizes = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
        matrices = [weights.part(f"{prefix}{name}.weight", size, hidden) for name, size in sizes.items()]
    if weights.has(f"{prefix}in_proj_ba.weight"):
        # For each key: beta of its heads, and their steps.
        scalars = as_float32(weights.take(f"{prefix}in_proj_ba.weight", 2 * layers.count, hidden))
        scalars = scalars.reshape(layers.groups, 2, -1, hidden).swapaxes(0, 1)
        return [*matrices, in_memory(np.ascontiguousarray(scalars).reshape(-1, hidden))]
    return [*matrices, *(weights.part(f"{prefix}{name}.weight", layers.count, hidden) for name in ("in_proj_b", "in_proj_a"))]


def convolution(weights: Weights, layers: RecurrentLayers, prefix: str) -> tuple[Array, Array | None]:
    """Returns the weights [taps, channels] of a layer's convolution, and its bias. Raises UnsupportedModel as `Weights.take` does."""
    name = f"{prefix}{layers.names.prefix}{layers.names.convolution}"
    taps = as_float32(weights.take(f"{name}.weight", layers.channels, 1, layers.taps)).reshape(layers.channels, layers.taps)
    bias = as_float32(weights.take(f"{name}.bias", layers.channels)) if layers.conv_bias else None
    return np.ascontiguousarray(taps.T), bias


def heads(weights: Weights, layers: RecurrentLayers, prefix: str) -> _core.RecurrentHeads | None:
    """Returns a layer's heads; None if it has none. Raises UnsupportedModel as `Weights.take` does, and for rates that are not negative."""
    if not layers.count:
        return None
    prefix += layers.names.prefix

    def vector(name: str, size: int) -> Array:
        return as_float32(weights.take(prefix + name, size))

    # GGUF files have the rates themselves.
    rates = -np.exp(vector("A_log", layers.count)) if weights.has(f"{prefix}A_log") else vector("A", layers.count)
    if not (np.isfinite(rates) & (rates < 0)).all():
        raise UnsupportedModel(f"tensor {prefix}A_log or {prefix}A gives rates of decay that are not negative numbers")
    space = layers.names.kind is RecurrentKind.SPACE
    return _core.RecurrentHeads(
        count=layers.count,
        groups=layers.groups,
        key_size=layers.key_size,
        value_size=layers.value_size,
        tiled=layers.tiled,
        rates=rates,
        step_bias=vector("dt_bias", layers.count),
        norm=vector("norm.weight", layers.width if space else layers.value_size),
        norm_group=layers.width // layers.groups if space else layers.value_size,
        skip=vector("D", layers.count) if space else None,
        steps=layers.steps if space else None,
    )
