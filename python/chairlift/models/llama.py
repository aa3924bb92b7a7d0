"""The Llama family (Llama, Mistral, Qwen2 and 3, Gemma 2 and 3, Phi-3, SmolLM3, Granite) over a ragged token axis and a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch.nn import functional

from chairlift.errors import UnsupportedModel
from chairlift.layers.activation import act_mul
from chairlift.layers.attention import AttentionPlan, Scales, paged_attention
from chairlift.layers.linear import Activations, Linear, Weight, quantise, stack, take_rows
from chairlift.layers.lora import AdapterRows, adapted
from chairlift.layers.norm import add_rms_norm, rms_norm
from chairlift.layers.rope import rope_write, rotations, spread
from chairlift.layers.tensor_parallel import ALONE, TensorParallelGroup
from chairlift.models.config import ModelConfig
from chairlift.models.rotary import RopeConfig

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""One layer's keys [blocks, kv_heads, block_size, head_dim] and values [blocks, kv_heads, block_size, value_dim]."""


class WeightSource(Protocol):
    """A source of a model's tensors, by their Hugging Face names."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of that name in the model's dtype and on its device. Raises if it has another shape."""
        ...

    def matrix(self, layer: str, outs: int, ins: int) -> Weight:
        """The weight [outs, ins] of a linear layer, quantised if the checkpoint's is. Raises if it has another shape."""
        ...

    def scales(self, name: str, heads: int) -> torch.Tensor | None:
        """The scales of that name on the model's device, fp32 [heads]; None if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one forward pass over T tokens; input_ids and positions are integer tensors [T]."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionPlan
    adapters: AdapterRows | None = None
    """The rows that have LoRA adapters, which only a `Llama` can have."""


class Llama:
    """A decoder. Projections of the same input (query, key and value; gate and up) are merged into one matrix."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        group: TensorParallelGroup = ALONE,
        quantization: str | None = None,
        rounds_activations: bool = False,
        longest: int | None = None,
    ) -> None:
        """Takes the model's tensors from `weights`. No sequence has more than `longest` tokens; None means the model's own limit. In a
        tensor-parallel group, `config` and `weights` are this process's part.

        `quantization` (int8 or fp8, see `Linear`) applies to the layers' matrices, which the checkpoint may have quantised already.
        `rounds_activations` applies to those that the checkpoint has in fp8.
        Embeddings and the head are not quantised, because their errors matter most and they are read a row at a time or once per step.
        Raises UnsupportedModel for architectures that only the CPU kernels support.
        """
        if config.only_in_rust:
            raise UnsupportedModel(f"{config.architecture} is only supported by the CPU kernels")
        self.group = group
        self.eps, self.softcap = config.rms_norm_eps, config.final_softcap
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", *shape)
        # Rounded to the embeddings' dtype, as in training.
        self.scale = torch.tensor(config.embedding_scale, dtype=self.embedding.dtype).item()
        before = [f"model.layers.{index}.input_layernorm.weight" for index in range(config.num_layers)]
        self.norm, *after = (_norm(config, weights, name) for name in (*before, "model.norm.weight"))
        self.layers = [_Layer(config, index, weights, norm, group, quantization, rounds_activations) for index, norm in enumerate(after)]
        for layer, following in pairwise(self.layers):
            layer.next_rounds = following.qkv.rounds_activations
        self.head = Linear(group.part(self.embedding) if config.tie_word_embeddings else weights.take("lm_head.weight", *shape))
        device = self.embedding.device
        longest = longest or config.max_position_embeddings
        self.rotations = {rope: _rotation(rope, config.head_dim, longest, device) for rope in {layer.rope for layer in self.layers}}
        self.temperature, self.logits_scale = config.temperature, config.logits_scale

    def forward(self, batch: ForwardBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Runs a batch over each layer's cache; returns hidden states [T, hidden]."""
        residual = functional.embedding(batch.input_ids, self.embedding)
        if self.scale != 1:
            residual.mul_(self.scale)
        rotation = {rope: rotations(batch.positions, frequencies, scales) for rope, (frequencies, scales) in self.rotations.items()}
        query_scale = None if self.temperature is None else _query_scale(batch.positions, *self.temperature).to(residual.dtype)
        x: Activations = rms_norm(residual, self.norm, self.eps, rounds=self.layers[0].qkv.rounds_activations)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer.forward(x, residual, rotation[layer.rope], query_scale, layer_cache, batch.attention, batch.adapters)
        # No `next_rounds` is set in the last layer.
        assert isinstance(x, torch.Tensor)
        return x

    def projections(self, layer: int) -> dict[str, tuple[Linear, slice]]:
        """Each projection of a layer, by its name in a checkpoint: the merged layer, and its columns of that layer's output."""
        return self.layers[layer].projections()

    def logits(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Logits at token positions `at` [N] of a batch's hidden states; returns [N, vocabulary]."""
        logits = self.group.all_gather(self.head(hidden[at]), len(self.embedding))
        if self.logits_scale != 1:
            logits.mul_(self.logits_scale)
        return logits if self.softcap is None else logits.float().div_(self.softcap).tanh_().mul_(self.softcap)


class _Layer:
    """One decoder layer: attention, then a gated MLP, each added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: WeightSource,
        next_norm: torch.Tensor,
        group: TensorParallelGroup,
        quantization: str | None,
        rounds_activations: bool,
    ) -> None:
        """`next_norm` is the first norm of the next layer, or the model's last norm."""
        self.group = group
        self.head_dim, self.eps, self.activation = config.head_dim, config.rms_norm_eps, config.activation
        self.window, self.scale, self.softcap = config.windows[index], config.attention_scale, config.attention_softcap
        self.residual_scale = config.residual_scale
        self.rope = None if not config.uses_rope[index] else config.rope if self.window is None else config.local_rope
        """None in a layer without rotary positions."""
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, kv = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        prefix = f"model.layers.{index}."
        self._merged: dict[Linear, dict[str, int]] = {}

        def merged(names: Sequence[str], sizes: Sequence[int], width: int, bias: bool, order: list[int] | None = None) -> Linear:
            """One Linear for several projections of the same input, which the checkpoint may have fused. `order` is that of its rows."""
            outs = dict(zip(names, sizes, strict=True)) if len(names) == len(sizes) else {names[0]: sum(sizes)}
            biases = [weights.take(f"{prefix}{name}.bias", size) for name, size in outs.items()] if bias else []
            try:
                weight = stack([weights.matrix(f"{prefix}{name}", size, width) for name, size in outs.items()])
            except ValueError as error:
                raise UnsupportedModel(f"{', '.join(f'{prefix}{name}' for name in outs)}: {error}") from None
            if order is not None:
                weight = take_rows(weight, torch.tensor(order, device=next_norm.device))
                biases = [torch.cat(biases)[order]] if biases else []
            if quantization and isinstance(weight, torch.Tensor):
                weight = quantise(weight, quantization)
            rounds = rounds_activations or quantization == "fp8"
            linear = Linear(weight, torch.cat(biases) if biases else None, rounds_activations=rounds)
            self._merged[linear] = outs
            return linear

        def norm(name: str) -> torch.Tensor:
            return _norm(config, weights, f"{prefix}{name}.weight")

        names = config.projections
        self.qkv = merged(names.qkv, (queries, kv, kv), hidden, config.qkv_bias, _spread_rows(config))
        self.output = merged((names.output,), (hidden,), queries, config.output_bias)
        self.gate_up = merged(names.gate_up, (inner, inner), hidden, config.mlp_bias)
        self.down = merged((names.down,), (hidden,), inner, config.mlp_bias)
        self.scales = kv_scales(weights, index, config.num_kv_heads)
        self.qk_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None
        # With post-norms, "post_attention_layernorm" is the norm after attention; without them it is the norm before the MLP.
        self.attention_norm = norm("post_attention_layernorm") if config.post_norms else None
        self.mlp_norm = norm("post_feedforward_layernorm") if config.post_norms else None
        self.norm = norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm")
        self.next_norm = next_norm
        self.next_rounds = False
        """Whether the next layer's first product rounds its input."""

    def projections(self) -> dict[str, tuple[Linear, slice]]:
        """Each projection's layer, by its name in a checkpoint, and its columns of the layer's output."""
        found = {}
        for linear, outs in self._merged.items():
            start = 0
            for name, size in outs.items():
                found[name.partition(".")[2]] = linear, slice(start, start + size)
                start += size
        return found

    def forward(
        self,
        x: Activations,
        residual: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        query_scale: torch.Tensor | None,
        cache: LayerCache,
        plan: AttentionPlan,
        adapters: AdapterRows | None,
    ) -> Activations:
        """Adds this layer's output for the normalised input x to `residual` [T, hidden]; returns the next layer's normalised input."""
        keys, values = cache
        qkv = adapted(self.qkv, x, adapters).view(len(residual), -1, self.head_dim)
        # Keys and values are written before attention, which reads this step's keys from the cache.
        scales = self.scales if keys.dtype == torch.float8_e4m3fn else None
        query = rope_write(qkv, rotation, keys, values, plan, norms=self.qk_norms, eps=self.eps, scales=scales)
        if query_scale is not None:
            query.mul_(query_scale)
        mixed = paged_attention(query, keys, values, plan, window=self.window, scale=self.scale, softcap=self.softcap, scales=scales)
        mixed = self._summed(self.output, mixed.flatten(1), adapters)
        # A kernel whose result only a product in fp8 reads rounds it.
        x = add_rms_norm(mixed, residual, self.norm, self.eps, inner=self.attention_norm, rounds=self.gate_up.rounds_activations)
        x = act_mul(adapted(self.gate_up, x, adapters), self.activation, rounds=self.down.rounds_activations)
        summed = self._summed(self.down, x, adapters)
        return add_rms_norm(summed, residual, self.next_norm, self.eps, inner=self.mlp_norm, rounds=self.next_rounds)

    def _summed(self, linear: Linear, x: Activations, adapters: AdapterRows | None) -> torch.Tensor:
        """The output of a projection of which each process has some columns, as it is added to the residual stream."""
        if linear.gathers and isinstance(x, torch.Tensor):
            x = self.group.all_gather(x, self.group.size * x.shape[1])
        summed = self.group.all_reduce(adapted(linear, x, adapters))
        return summed if self.residual_scale == 1 else summed.mul_(self.residual_scale)


def _rotation(rope: RopeConfig | None, head_dim: int, longest: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Frequencies of a head's pairs and factors of their cosines and sines, fp32 [head_dim / 2]; 0 and 1 for pairs without rotation."""
    frequencies, scales = torch.zeros(head_dim // 2), torch.ones(head_dim // 2)
    if rope is not None:
        frequencies[: rope.dim // 2] = torch.from_numpy(rope.frequencies(longest))
        scales[: rope.dim // 2] = rope.scale
    return frequencies.to(device), None if rope is None or rope.scale == 1 else scales.to(device)


def _query_scale(positions: torch.Tensor, growth: float, span: int) -> torch.Tensor:
    """The factors [tokens, 1, 1] of queries that grow with their position: 1 + growth * ln(1 + position // span)."""
    return (positions // span).float().log1p_().mul_(growth).add_(1).view(-1, 1, 1)


def _spread_rows(config: ModelConfig) -> list[int] | None:
    """The order of the rows of queries, keys and values in which the pairs of a partial rotation are half a head apart; None: as they are.

    Queries and keys have equal orders, which change no product.
    """
    if config.rope.dim == config.head_dim:
        return None
    rotated, values = (config.num_heads + config.num_kv_heads) * config.head_dim, config.num_kv_heads * config.head_dim
    head = spread(config.head_dim, config.rope.dim)
    return [*(start + i for start in range(0, rotated, config.head_dim) for i in head), *range(rotated, rotated + values)]


def _norm(config: ModelConfig, weights: WeightSource, name: str) -> torch.Tensor:
    """The weight of a norm. With an offset (Gemma) the sum is kept in fp32, because it needs more digits than the checkpoint's weight."""
    weight = weights.take(name, config.head_dim if "self_attn" in name else config.hidden_size)
    return weight.float() + config.norm_offset if config.norm_offset else weight


def kv_scales(weights: WeightSource, layer: int, heads: int) -> Scales | None:
    """The scales of a layer's 8-bit keys and values, under any of vLLM's names for them; None if the checkpoint has neither."""
    prefix = f"model.layers.{layer}.self_attn."
    names = {kind: (f"{prefix}{kind}_scale", f"{prefix}attn.{kind}_scale", f"{prefix}{kind}_proj.{kind}_scale") for kind in "kv"}
    k, v = (next((found for name in names[kind] if (found := weights.scales(name, heads)) is not None), None) for kind in "kv")
    # A missing scale is 1.
    if k is None:
        return None if v is None else (torch.ones_like(v), v)
    return k, torch.ones_like(k) if v is None else v
