"""Recurrent layers in torch, token by token: on a CPU, and for tests. Without triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from chairlift.layers.recurrent import Convolution, Heads, StateStep


class _Chunk(NamedTuple):
    """The tokens of a sequence in a step, its slot, whether it begins without a state, and its writes (see `StateStep`)."""

    start: int
    end: int
    slot: int
    fresh: bool
    writes: list[list[int]]


def _chunks(step: StateStep) -> Iterator[_Chunk]:
    starts, writes, write_starts = step.query_starts.tolist(), step.writes.tolist(), step.write_starts.tolist()
    for start, end, first, last in zip(starts, starts[1:], write_starts, write_starts[1:], strict=False):
        if first < last:
            yield _Chunk(start, end, writes[last - 1][1], int(step.positions[start]) == 0, writes[first:last])


def convolve(projected: torch.Tensor, columns: torch.Tensor, layer: Convolution, step: StateStep) -> torch.Tensor:
    """See `Convolution`."""
    taps, channels = layer.taps.shape
    rows = projected.float()
    x = rows[:, layer.first : layer.first + channels]
    if layer.gated:
        x = x * rows[:, layer.first - 2 * channels : layer.first - channels]
    out = projected.new_zeros(len(projected), channels)
    for start, end, slot, fresh, writes in _chunks(step):
        before = torch.zeros_like(columns[slot]) if fresh else columns[slot]
        seen = torch.cat((before, x[start:end]))
        sums = torch.zeros_like(x[start:end]) if layer.bias is None else layer.bias.expand(end - start, -1).clone()
        for tap in range(taps):
            sums += seen[tap : tap + end - start] * layer.taps[tap]
        active = sums * rows[start:end, layer.first - channels : layer.first] if layer.gated else functional.silu(sums)
        out[start:end] = active.to(out.dtype)
        for tokens, target in writes:
            columns[target] = seen[tokens : tokens + taps - 1]
    return out


def advance_heads(mixed: torch.Tensor, projected: torch.Tensor, matrices: torch.Tensor, heads: Heads, step: StateStep) -> torch.Tensor:
    """The outputs of heads before their norm (see `Heads`)."""
    offsets, tokens, count, size = heads.offsets, len(mixed), heads.count, heads.key_size
    wide, rows = mixed.float(), projected.float()

    def of_heads(offset: int) -> torch.Tensor:
        vectors = wide[:, offset : offset + heads.groups * size].view(tokens, heads.groups, size)
        each = count // heads.groups
        return vectors.repeat(1, each, 1) if heads.tiled else vectors.repeat_interleave(each, 1)

    queries, keys = of_heads(offsets.queries), of_heads(offsets.keys)
    values = wide[:, offsets.values : offsets.values + count * heads.value_size].view(tokens, count, -1)
    steps = functional.softplus(rows[:, offsets.steps : offsets.steps + count] + heads.step_bias).clamp(*heads.limits)
    decays, factors = (heads.rates * steps).exp(), steps
    if heads.delta:
        keys = keys * (keys.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        queries = queries * (queries.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * size**-0.5
        factors = rows[:, offsets.betas : offsets.betas + count].sigmoid()
    out = torch.zeros_like(values)
    for start, _, slot, fresh, writes in _chunks(step):
        state = torch.zeros_like(matrices[slot]) if fresh else matrices[slot].clone()
        at = start
        for written, target in writes:
            for token in range(at, start + written):
                state *= decays[token, :, None, None]
                found = torch.einsum("hkv,hk->hv", state, keys[token]) if heads.delta else 0
                state += keys[token, :, :, None] * (factors[token, :, None] * (values[token] - found))[:, None]
                out[token] = torch.einsum("hkv,hk->hv", state, queries[token])
            at = start + written
            matrices[target] = state
    if heads.skip is not None:
        out += heads.skip[:, None] * values
    return out.view(tokens, -1).to(mixed.dtype)


def gated_norm(x: torch.Tensor, projected: torch.Tensor, heads: Heads) -> torch.Tensor:
    """The outputs of heads after their norm and gates (see `Heads`)."""
    gates = functional.silu(projected[:, heads.offsets.gates : heads.offsets.gates + x.shape[1]].float())
    wide = x.float() if heads.delta else x.float() * gates
    groups = wide.view(len(x), -1, heads.norm_group)
    scale = (groups.square().mean(-1, keepdim=True) + heads.eps).rsqrt()
    normed = (groups * scale * heads.norm.view(-1, heads.norm_group)).view_as(wide)
    return (normed * gates if heads.delta else normed).to(x.dtype)
