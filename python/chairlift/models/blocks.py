"""The blocks of a decoder layer in torch: attention and MLP. Projections of the same input are merged into one matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from chairlift.architectures import Projections
from chairlift.errors import UnsupportedModel
from chairlift.layers.activation import activate
from chairlift.layers.attention import Scales, paged_attention
from chairlift.layers.linear import Activations, Linear, Weight, quantise, stack, take_rows
from chairlift.layers.lora import adapted
from chairlift.layers.norm import Norm, rms_norm
from chairlift.layers.rope import rope_write, spread
from chairlift.layers.tensor_parallel import TensorParallelGroup
from chairlift.models.config import ModelConfig
from chairlift.models.forward_batch import ForwardBatch, LayerCache, WeightSource
from chairlift.models.rotary import RopeConfig


@dataclass(frozen=True, slots=True)
class Pass:
    """What the blocks of a pass share: the batch, each layer's cache, rotations and factors of queries."""

    batch: ForwardBatch
    cache: Sequence[LayerCache]
    rotations: Mapping[RopeConfig | None, tuple[torch.Tensor, torch.Tensor]]
    query_scale: torch.Tensor | None


class Place(NamedTuple):
    """The layer that a projection is merged into, its columns of that layer's output, and their order if it is not the checkpoint's."""

    linear: Linear
    columns: slice
    order: torch.Tensor | None


class LayerWeights:
    """Reads the weights of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        source: WeightSource,
        dtype: torch.dtype,
        group: TensorParallelGroup,
        quantization: str | None,
        rounds_activations: bool,
    ) -> None:
        """`dtype` is that of activations (see `Llama` for the others)."""
        self.config, self.index, self.source, self.dtype, self.group = config, index, source, dtype, group
        self.prefix = f"model.layers.{index}."
        self.quantization, self._rounds = quantization, rounds_activations
        self.projections: dict[str, Place] = {}
        """The place of each projection, by its name in a checkpoint."""

    def norm(self, name: str, size: int) -> torch.Tensor:
        """The weight of a norm."""
        return norm_weight(self.config, self.source, f"{self.prefix}{name}", size)

    def head_norms(self, name: str, heads: int, size: int) -> torch.Tensor:
        """The weights [heads, size] of the layer norms of heads, which StableLM has in a tensor each."""
        if self.source.has(f"{self.prefix}{name}.weight"):
            return self.source.take(f"{self.prefix}{name}.weight", heads, size)
        return torch.stack([self.source.take(f"{self.prefix}{name}.norms.{head}.weight", size) for head in range(heads)])

    def stream_norm(self, name: str | None) -> Norm | None:
        """A norm of the residual stream; None if the architecture has none."""
        return None if name is None else stream_norm(self.config, self.source, self.prefix + name)

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """A Linear of a matrix, which is rounded if that was asked for and the checkpoint has not quantised it."""
        if self.quantization and isinstance(weight, torch.Tensor):
            weight = quantise(weight, self.quantization)
        return Linear(weight, bias, rounds_activations=self._rounds or self.quantization == "fp8")

    def merged(self, names: Sequence[str], sizes: Sequence[int], ins: int, bias: bool = False, order: torch.Tensor | None = None) -> Linear:
        """One Linear for several projections of the same input, which the checkpoint may have fused. `order` is that of its rows.

        Raises UnsupportedModel if they are quantised in different ways.
        """
        outs = dict(zip(names, sizes, strict=True)) if len(names) == len(sizes) else {names[0]: sum(sizes)}
        biases = [self.source.take(f"{self.prefix}{name}.bias", size) for name, size in outs.items()] if bias else []
        try:
            weight = stack([self.source.matrix(f"{self.prefix}{name}", size, ins) for name, size in outs.items()])
        except ValueError as error:
            raise UnsupportedModel(f"{', '.join(f'{self.prefix}{name}' for name in outs)}: {error}") from None
        if order is not None:
            weight = take_rows(weight, order)
            biases = [torch.cat(biases)[order]] if biases else []
        linear = self.linear(weight, torch.cat(biases) if biases else None)
        start = 0
        for name, size in outs.items():
            columns = slice(start, start + size)
            self.projections[name.partition(".")[2].replace("out_proj", "o_proj")] = Place(
                linear, columns, None if order is None else order[columns] - start
            )
            start += size
        return linear

    def fused_qkv(self) -> tuple[str, ...]:
        """The projection of queries, keys and values, if the checkpoint has one instead of those that the architecture has.

        Raises UnsupportedModel if it would be split.
        """
        fused = self.config.family.projections.fused_in(self.source.has, self.prefix)
        if fused is None:
            return ()
        if self.group.size > 1:
            raise UnsupportedModel(f"{self.prefix}{fused} is a fused projection, which cannot be split among processes")
        return (fused,)

    def gate_up(self, names: Projections, inner: int, bias: bool = False) -> Linear:
        """The projections gate and up of an MLP, or up alone if it has no gate."""
        fused = not names.apart or self.source.has(f"{self.prefix}{names.gate_up[0]}.weight")
        sizes = (inner,) * (2 if self.config.gated else 1)
        return self.merged(names.gate_up if fused else names.apart, sizes, self.config.hidden_size, bias)


class Block(ABC):
    """A part of a layer whose output is added to the residual stream.

    `norm` is the norm of its input, which is rounded to fp8 if the block `rounds` it, and `post_norm` that of its output, if it has them. A
    `parallel` block reads what the block before it reads, or with a norm of its own the residual stream that that one reads.
    """

    norm: Norm | None
    post_norm: Norm | None = None
    parallel = False
    rounds = False

    def __init__(self, weights: LayerWeights) -> None:
        """Keeps nothing of `weights`, which may hold a whole checkpoint."""
        self._group, self._residual_scale = weights.group, weights.config.scales.residual

    @abstractmethod
    def forward(self, x: Activations, given: Pass) -> torch.Tensor:
        """Returns the block's output [T, hidden] for its normalised input."""

    def _summed(self, linear: Linear, x: Activations, given: Pass) -> torch.Tensor:
        """The output of a projection of which each process has some columns, as it is added to the residual stream."""
        if linear.gathers and isinstance(x, torch.Tensor):
            x = self._group.all_gather(x, self._group.size * x.shape[1])
        return self._scaled(self._group.all_reduce(adapted(linear, x, given.batch.adapters)))

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        """An output as it is added to the residual stream."""
        return output if self._residual_scale == 1 else output.mul_(self._residual_scale)


class Attention(Block):
    """Attention over a layer's KV cache."""

    def __init__(self, weights: LayerWeights, cache_index: int, scales: Scales | None) -> None:
        """`cache_index` is the layer's index among those that have keys and values, `scales` are those of 8-bit keys and values."""
        super().__init__(weights)
        config, index, names = weights.config, weights.index, weights.config.family.projections
        qkv = weights.fused_qkv() or names.qkv
        self._cache_index, self.scales = cache_index, scales
        self._eps, self._dim, self._gated = config.rms_norm_eps, config.head_dim, config.family.gated_attention
        self._window, self._scale, self._softcap = config.windows[index], config.scales.attention, config.scales.scores_cap
        self.rope = None if not config.uses_rope[index] else config.rope if self._window is None else config.local_rope
        """None in a layer without rotary positions."""
        queries, kv = config.num_heads * self._dim, config.num_kv_heads * self._dim
        self._heads = config.num_heads + 2 * config.num_kv_heads
        self.norm = weights.stream_norm(config.family.norms.attention)
        wide = queries * (2 if config.family.gated_queries else 1)
        gates = {names.gate: queries} if names.gate else {}
        self.qkv = weights.merged(
            (*qkv, *gates),
            (wide, kv, kv, *gates.values()),
            config.hidden_size,
            config.qkv_bias,
            _order(config, by_head=names.by_head and qkv is names.qkv),
        )
        self.rounds = self.qkv.rounds_activations
        self.output = weights.merged((names.output,), (config.hidden_size,), queries, config.output_bias)
        self.post_norm = weights.stream_norm(config.family.norms.after_attention) if config.family.post_norms else None
        self._head_norms = self._whole_norms = self._layer_norms = None
        self._rotated_first = config.family.rotated_first
        if config.qk_norm and config.family.centred:
            order, norms = _spread_head(config), config.family.norms
            query = weights.head_norms(norms.query, config.num_heads, self._dim)[:, order]
            self._layer_norms = query, weights.head_norms(norms.key, config.num_kv_heads, self._dim)[:, order]
        elif config.qk_norm:
            head, whole = torch.tensor(_spread_head(config)), config.family.whole_norms
            sizes = {config.family.norms.query: queries, config.family.norms.key: kv}
            found = (weights.norm(name, size if whole else self._dim) for name, size in sizes.items())
            query, key = (norm.view(-1, self._dim)[:, head.to(norm.device)].flatten() for norm in found)
            if whole:
                self._whole_norms = query, key
            else:
                self._head_norms = query, key
        self._sinks = weights.source.floats(f"{weights.prefix}self_attn.sinks", config.num_heads) if config.family.sinks else None

    def forward(self, x: Activations, given: Pass) -> torch.Tensor:
        """Stores keys and values and attends."""
        keys, values = given.cache[self._cache_index]
        plan = given.batch.attention
        projected = adapted(self.qkv, x, given.batch.adapters)
        projected = projected.view(len(projected), -1, self._dim)
        qkv = projected[:, : self._heads] if self._gated else projected
        if self._whole_norms is not None:
            _normalise_whole(qkv, self._whole_norms, keys.shape[1], self._eps)
        if self._layer_norms is not None:
            _normalise_heads(qkv, self._layer_norms, keys.shape[1], self._eps)
        # Keys and values are written before attention, which reads this step's keys from the cache.
        scales = self.scales if keys.dtype == torch.float8_e4m3fn else None
        query = rope_write(
            qkv,
            given.rotations[self.rope],
            keys,
            values,
            plan,
            norms=self._head_norms,
            rotated_first=self._rotated_first,
            eps=self._eps,
            scales=scales,
        )
        if given.query_scale is not None:
            query.mul_(given.query_scale)
        mixed = paged_attention(
            query,
            keys,
            values,
            plan,
            window=self._window,
            scale=self._scale,
            softcap=self._softcap,
            sinks=self._sinks,
            scales=scales,
        )
        if self._gated:
            mixed = mixed.mul_(projected[:, self._heads :].sigmoid())
        return self._summed(self.output, mixed.flatten(1), given)


class Mlp(Block):
    """An MLP, with a gate or without."""

    def __init__(self, weights: LayerWeights) -> None:
        super().__init__(weights)
        config, names = weights.config, weights.config.family.projections
        self._activation = config.activation
        self.norm, self.parallel = weights.stream_norm(config.mlp_norm), config.parallel
        self.gate_up = weights.gate_up(names, config.intermediate_size, config.mlp_bias)
        self.rounds = self.gate_up.rounds_activations
        self.down = weights.merged((names.down,), (config.hidden_size,), config.intermediate_size, config.mlp_bias)
        self.post_norm = weights.stream_norm(config.family.norms.after_mlp) if config.family.post_norms else None

    def forward(self, x: Activations, given: Pass) -> torch.Tensor:
        """Computes the MLP."""
        # A kernel whose result only a product in fp8 reads rounds it.
        inner = activate(adapted(self.gate_up, x, given.batch.adapters), self._activation, rounds=self.down.rounds_activations)
        return self._summed(self.down, inner, given)


def stream_norm(config: ModelConfig, source: WeightSource, name: str) -> Norm:
    """A norm of the residual stream."""
    family, size = config.family, config.hidden_size
    bias = source.take(f"{name}.bias", size) if family.centred and family.norm_biases else None
    return Norm(norm_weight(config, source, name, size), config.rms_norm_eps, family.centred, bias)


def norm_weight(config: ModelConfig, source: WeightSource, name: str, size: int) -> torch.Tensor:
    """The weight of a norm. With an offset (Gemma) the sum is kept in fp32, because it needs more digits than the checkpoint's weight."""
    weight = source.take(f"{name}.weight", size)
    return weight.float() + config.family.norm_offset if config.family.norm_offset else weight


def _spread_head(config: ModelConfig) -> list[int]:
    """The order of a head's numbers in which the pairs of a rotation are half a head apart."""
    return [config.head_order[at] for at in spread(config.head_dim, config.rope.dim)]


def _order(config: ModelConfig, by_head: bool) -> torch.Tensor | None:
    """The order of the rows of queries, keys, values and gates; None: as they are.

    In the checkpoint the rows of the query and of the gate of one head follow each other, or if they are `by_head` those of its query, key
    and value. Queries and keys have equal orders, which change no product.
    """
    dim, head = config.head_dim, _spread_head(config)
    if by_head:
        parts = torch.arange(3 * config.num_heads * dim).view(-1, 3, dim).transpose(0, 1)
        return torch.cat((parts[:2, :, head].flatten(), parts[2].flatten()))
    gated = config.family.gated_queries
    if head == [*range(dim)] and not gated:
        return None
    pitch = dim * (2 if gated else 1)
    queries, keys = config.num_heads * pitch, config.num_kv_heads * dim
    starts = [*range(0, queries, pitch), *range(queries, queries + keys, dim)]
    gates = [at for start in range(dim, queries, pitch) for at in range(start, start + dim)] if gated else []
    rows = [*(start + at for start in starts for at in head), *range(queries + keys, queries + 2 * keys), *gates]
    return torch.tensor(rows)


def _query_and_key(qkv: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The heads of each token's query, and those of its key."""
    return qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads]


def _normalise_heads(qkv: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], kv_heads: int, eps: float) -> None:
    """Applies layer norms with weights of their own to each head of a token's query, and of its key, in place."""
    for part, weight in zip(_query_and_key(qkv, kv_heads), weights, strict=True):
        part.copy_(functional.layer_norm(part.float(), part.shape[-1:], eps=eps) * weight.float())


def _normalise_whole(qkv: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], kv_heads: int, eps: float) -> None:
    """Normalises all heads of a token's query together, and those of its key, in place."""
    for part, weight in zip(_query_and_key(qkv, kv_heads), weights, strict=True):
        part.copy_(rms_norm(part.flatten(1).contiguous(), weight, eps).view_as(part))
