"""A decoder in torch, over a ragged token axis and a paged cache: the Llama family, with experts and with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional

from chairlift.errors import UnsupportedModel
from chairlift.layers.attention import Scales
from chairlift.layers.linear import Linear
from chairlift.layers.norm import add_normalise, normalise
from chairlift.layers.rope import rotations
from chairlift.layers.tensor_parallel import ALONE, TensorParallelGroup
from chairlift.models.blocks import Attention, Block, LayerWeights, Mlp, Pass, Place, stream_norm
from chairlift.models.config import ModelConfig
from chairlift.models.forward_batch import ForwardBatch, LayerCache, WeightSource
from chairlift.models.latent_attention import LatentAttention
from chairlift.models.mixture import Mixture
from chairlift.models.recurrent import Recurrent
from chairlift.models.rotary import RopeConfig


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: a block that mixes tokens, then an MLP or a mixture of experts. In some models it is one of both."""

    mixer: Attention | LatentAttention | Recurrent | None
    feed: Mlp | Mixture | None
    projections: dict[str, Place]
    """The place of each projection, by its name in a checkpoint."""

    @property
    def blocks(self) -> list[Block]:
        """The layer's blocks in order."""
        return [block for block in (self.mixer, self.feed) if block is not None]


class Llama:
    """A decoder."""

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
            raise UnsupportedModel(f"only the CPU kernels support {config.architecture}")
        self.group = group
        self.softcap = config.scales.logits_cap
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take(f"{config.embedding}.weight", *shape)
        # Rounded to the embeddings' dtype, as in training.
        self.scale = torch.tensor(config.scales.embedding, dtype=self.embedding.dtype).item()
        self.positions = _positions(config, weights)
        given = (weights, self.embedding.dtype, group, quantization, rounds_activations)
        self.layers = [_layer(LayerWeights(config, index, *given)) for index in range(config.num_layers)]
        self.norm = stream_norm(config, weights, config.family.norms.last)
        bias = weights.take("lm_head.bias", config.vocab_size) if config.family.head_bias else None
        self.head = Linear(group.part(self.embedding) if config.tie_word_embeddings else weights.take("lm_head.weight", *shape), bias)
        device = self.embedding.device
        longest = longest or config.max_position_embeddings
        ropes = {layer.mixer.rope for layer in self.layers if isinstance(layer.mixer, Attention | LatentAttention)}
        rotated = config.latent.rotated if config.latent else config.head_dim
        self.rotations = {rope: _rotation(rope, rotated, longest, device) for rope in ropes}
        self.temperature, self.logits_scale = config.temperature, config.scales.logits

    def forward(self, batch: ForwardBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Runs a batch over each layer's cache; returns hidden states [T, hidden]."""
        residual = functional.embedding(batch.input_ids, self.embedding)
        if self.scale != 1:
            residual.mul_(self.scale)
        if self.positions is not None:
            residual.add_(functional.embedding(batch.positions, self.positions))
        rotation = {rope: rotations(batch.positions, frequencies, scales) for rope, (frequencies, scales) in self.rotations.items()}
        query_scale = None if self.temperature is None else _query_scale(batch.positions, *self.temperature).to(residual.dtype)
        given = Pass(batch, cache, rotation, query_scale)
        blocks = [block for layer in self.layers for block in layer.blocks]
        x = normalise(residual, blocks[0].norm, rounds=blocks[0].rounds)
        for block, after in pairwise(blocks):
            output = block.forward(x, given)
            if after.parallel:
                x = x if after.norm is None else normalise(residual, after.norm, rounds=after.rounds)
                residual.add_(output)
            else:  # A kernel whose result only a product in fp8 reads rounds it.
                x = add_normalise(output, residual, after.norm, inner=block.post_norm, rounds=after.rounds)
        last = add_normalise(blocks[-1].forward(x, given), residual, self.norm, inner=blocks[-1].post_norm)
        assert isinstance(last, torch.Tensor)
        return last

    def logits(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Logits at token positions `at` [N] of a batch's hidden states; returns [N, vocabulary]."""
        logits = self.group.all_gather(self.head(hidden[at]), len(self.embedding))
        if self.logits_scale != 1:
            logits.mul_(self.logits_scale)
        return logits if self.softcap is None else logits.float().div_(self.softcap).tanh_().mul_(self.softcap)


def _positions(config: ModelConfig, weights: WeightSource) -> torch.Tensor | None:
    """The embeddings of positions, if the model has them."""
    name, unused = config.family.positions, config.family.unused_positions
    if name is None:
        return None
    return weights.take(f"{name}.weight", config.max_position_embeddings + unused, config.hidden_size)[unused:]


def _layer(weights: LayerWeights) -> Layer:
    """A layer of the configuration."""
    config, index = weights.config, weights.index
    mixer: Attention | LatentAttention | Recurrent | None = None
    if config.recurrence and config.recurrence.layers[index]:
        mixer = Recurrent(weights, config.recurrence)
    elif config.attention[index]:
        place = sum(config.attention[:index]), kv_scales(weights.source, index, config.num_kv_heads)
        mixer = LatentAttention(weights, config.latent, *place) if config.latent else Attention(weights, *place)
    feed: Mlp | Mixture | None = None
    if config.experts and config.experts.layers[index]:
        feed = Mixture(weights, config.experts)
    elif config.feeds[index]:
        feed = Mlp(weights)
    if mixer and feed and feed.parallel and feed.norm is None:  # both read the same numbers
        mixer.rounds = feed.rounds = mixer.rounds and feed.rounds
    return Layer(mixer, feed, weights.projections)


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


def kv_scales(weights: WeightSource, layer: int, heads: int) -> Scales | None:
    """The scales of a layer's 8-bit keys and values, under any of vLLM's names for them; None if the checkpoint has neither."""
    prefix = f"model.layers.{layer}.self_attn."
    names = {kind: (f"{prefix}{kind}_scale", f"{prefix}attn.{kind}_scale", f"{prefix}{kind}_proj.{kind}_scale") for kind in "kv"}
    k, v = (next((found for name in names[kind] if (found := weights.scales(name, heads)) is not None), None) for kind in "kv")
    # A missing scale is 1.
    if k is None:
        return None if v is None else (torch.ones_like(v), v)
    return k, torch.ones_like(k) if v is None else v
