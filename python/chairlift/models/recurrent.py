"""A recurrent layer in torch, and its tensors."""

from __future__ import annotations

import math
from contextlib import suppress

import torch

from chairlift.architectures import RecurrentKind
from chairlift.errors import UnsupportedModel
from chairlift.layers.linear import Activations, Linear, Weight, stack, take_rows
from chairlift.layers.recurrent import Convolution, Heads, Offsets
from chairlift.models.blocks import Block, LayerWeights, Pass
from chairlift.models.recurrence import RecurrentLayers


class Recurrent(Block):
    """A short convolution, or heads with matrices as states after one."""

    def __init__(self, weights: LayerWeights, layers: RecurrentLayers) -> None:
        """Reads the layer's tensors. Raises UnsupportedModel."""
        super().__init__(weights)
        config, prefix = weights.config, weights.prefix + layers.names.prefix
        self._state_index = sum(layers.layers[: weights.index])
        self.norm = weights.stream_norm(config.family.norms.attention)
        kind, source = layers.names.kind, weights.source
        taps = source.floats(f"{prefix}{layers.names.convolution}.weight", layers.channels, 1, layers.taps)
        if kind is RecurrentKind.DELTA:
            self._projections = _delta_projections(weights, layers, taps.device)
        else:
            names = [layers.names.prefix + name for name in layers.names.projections]
            self._projections = [weights.merged(names, (layers.projected,), layers.hidden, layers.bias)]
        self.rounds = all(projection.rounds_activations for projection in self._projections)
        self._convolution = Convolution(
            taps=taps.view(layers.channels, layers.taps).t().contiguous(),
            bias=source.floats(f"{prefix}{layers.names.convolution}.bias", layers.channels) if layers.conv_bias else None,
            first={RecurrentKind.CONVOLUTION: 2 * layers.hidden, RecurrentKind.DELTA: 0, RecurrentKind.SPACE: layers.width}[kind],
            gated=kind is RecurrentKind.CONVOLUTION,
        )
        self._heads = _heads(weights, layers, prefix) if layers.count else None
        self._output = weights.merged((layers.names.prefix + layers.names.output,), (layers.hidden,), layers.width, layers.bias)

    def forward(self, x: Activations, given: Pass) -> torch.Tensor:
        """Computes the layer and moves the states of the step's sequences on."""
        step = given.batch.states
        assert step is not None
        columns, matrices = step.layers[self._state_index]
        parts = [projection(x) for projection in self._projections]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        mixed = self._convolution(projected, step, columns)
        if self._heads is not None:
            mixed = self._heads(mixed, projected, step, matrices)
        return self._summed(self._output, mixed, given)


def _heads(weights: LayerWeights, layers: RecurrentLayers, prefix: str) -> Heads:
    floats = weights.source.floats
    # GGUF files have the rates themselves.
    logarithms = weights.source.has(f"{prefix}A_log")
    rates = -floats(f"{prefix}A_log", layers.count).exp() if logarithms else floats(f"{prefix}A", layers.count)
    if not (rates.isfinite() & (rates < 0)).all():
        raise UnsupportedModel(f"tensor {prefix}A_log or {prefix}A gives rates of decay that are not negative numbers")
    space = layers.names.kind is RecurrentKind.SPACE
    return Heads(
        count=layers.count,
        groups=layers.groups,
        key_size=layers.key_size,
        value_size=layers.value_size,
        tiled=layers.tiled,
        rates=rates,
        step_bias=floats(f"{prefix}dt_bias", layers.count),
        skip=floats(f"{prefix}D", layers.count) if space else None,
        limits=layers.steps if space else (0.0, math.inf),
        norm=floats(f"{prefix}norm.weight", layers.width if space else layers.value_size),
        norm_group=layers.width // layers.groups if space else layers.value_size,
        eps=weights.config.rms_norm_eps,
        offsets=_offsets(layers, space),
    )


def _offsets(layers: RecurrentLayers, space: bool) -> Offsets:
    """The offsets of a token's parts. The projection is z, values, keys, queries, steps, or with the delta rule queries, keys, values, z,
    betas, steps; the convolution has its queries, keys and values.
    """
    keys, width = layers.groups * layers.key_size, layers.width
    if space:
        return Offsets(queries=width + keys, keys=width, values=0, gates=0, steps=2 * width + 2 * keys, betas=0)
    betas = 2 * keys + 2 * width
    return Offsets(queries=0, keys=keys, values=2 * keys, gates=2 * keys + width, betas=betas, steps=betas + layers.count)


def _delta_projections(weights: LayerWeights, layers: RecurrentLayers, device: torch.device) -> list[Linear]:
    """The projections of a layer with the delta rule, whose outputs are queries, keys, values, gates, betas and steps.

    Checkpoints have them in two matrices with the rows of one key after another, or in four. They are one here, unless the checkpoint has
    quantised only some of them.
    """
    source, prefix = weights.source, weights.prefix + layers.names.prefix
    keys, values, hidden, groups = layers.groups * layers.key_size, layers.width, layers.hidden, layers.groups

    def by_kind(name: str, sizes: list[int]) -> Weight:
        """A matrix with rows of several kinds for each key, sorted by kind."""
        rows = torch.arange(groups * sum(sizes), device=device).view(groups, -1)
        order = torch.cat([part.flatten() for part in rows.split_with_sizes(sizes, 1)])
        return take_rows(source.matrix(prefix + name, len(order), hidden), order)

    if source.has(f"{prefix}in_proj_qkvz.weight"):
        both = values // groups
        matrices = [by_kind("in_proj_qkvz", [layers.key_size, layers.key_size, both, both])]
    else:
        matrices = [
            source.matrix(prefix + name, size, hidden) for name, size in {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}.items()
        ]
    if source.has(f"{prefix}in_proj_ba.weight"):
        matrices.append(by_kind("in_proj_ba", [layers.count // groups] * 2))
    else:
        matrices += [source.matrix(prefix + name, layers.count, hidden) for name in ("in_proj_b", "in_proj_a")]
    with suppress(ValueError):
        matrices = [stack(matrices)]
    return [weights.linear(matrix) for matrix in matrices]
