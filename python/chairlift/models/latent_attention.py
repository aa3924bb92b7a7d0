"""Attention to latents in torch."""

from __future__ import annotations

import torch

from chairlift.layers.attention import Scales, paged_attention, write_kv
from chairlift.layers.linear import Activations, multiplied_out
from chairlift.layers.norm import rms_norm
from chairlift.layers.rope import rotate
from chairlift.models.blocks import Block, LayerWeights, Pass
from chairlift.models.latent import LATENT_EPS, Latent


class LatentAttention(Block):
    """Attention to latents (MLA: DeepSeek-V2, 2024), with one latent and one rotated key a token in the cache.

    Queries are multiplied by the matrices of the keys, and outputs by those of the values. So all heads attend to the same vectors, as with
    one KV head whose values are the first numbers of its keys.
    """

    def __init__(self, weights: LayerWeights, latent: Latent, cache_index: int, scales: Scales | None) -> None:
        """`cache_index` is the layer's index in the cache. Of the `scales` of 8-bit keys and values those of keys are used."""
        super().__init__(weights)
        config = weights.config
        self._latent, self._cache_index = latent, cache_index
        self.scales = None if scales is None else (scales[0], scales[0])
        self.rope = config.rope
        self.norm = weights.stream_norm(config.family.norms.attention)
        heads = [head * latent.query + at for head in range(latent.heads) for at in _halves(latent.plain, latent)]
        made, down = ("q_a_proj", latent.query_rank) if latent.query_rank else ("q_proj", latent.queries)
        rows = list(range(down)) if latent.query_rank else heads
        rows += [down + at for at in _halves(latent.rank, latent)]
        names = f"self_attn.{made}", "self_attn.kv_a_proj_with_mqa"
        self.down = weights.merged(names, (down, latent.cached), config.hidden_size, order=torch.tensor(rows))
        self.rounds = self.down.rounds_activations
        self._query_up = self._query_norm = None
        if latent.query_rank:
            self._query_norm = weights.norm("self_attn.q_a_layernorm", latent.query_rank)
            order = torch.tensor(heads)
            self._query_up = weights.merged(("self_attn.q_b_proj",), (latent.queries,), latent.query_rank, order=order)
        self._latent_norm = weights.norm("self_attn.kv_a_layernorm", latent.rank)
        self._key_up, self._value_up = _keys_and_values(weights, latent)
        self.output = weights.merged((config.family.projections.output,), (config.hidden_size,), latent.heads * latent.value)

    def forward(self, x: Activations, given: Pass) -> torch.Tensor:
        """Stores latents and rotated keys, and attends."""
        latent, plan, rotation = self._latent, given.batch.attention, given.rotations[self.rope]
        keys, values = given.cache[self._cache_index]
        queries, found = self.down(x).tensor_split((-latent.cached,), 1)
        if self._query_up is not None and self._query_norm is not None:
            queries = self._query_up(rms_norm(queries.contiguous(), self._query_norm, LATENT_EPS))
        queries = queries.view(len(queries), latent.heads, latent.query)
        normed = rms_norm(found[:, : latent.rank].contiguous(), self._latent_norm, LATENT_EPS)
        key = torch.cat((normed.unsqueeze(1), rotate(found[:, None, latent.rank :], rotation)), -1)
        scales = self.scales if keys.dtype == torch.float8_e4m3fn else None
        write_kv(key, key[..., :0], keys, values, plan, scales=scales)
        plain = torch.bmm(queries[..., : latent.plain].transpose(0, 1), self._key_up).transpose(0, 1)
        query = torch.cat((plain, rotate(queries[..., latent.plain :], rotation)), -1)
        mixed = paged_attention(query, keys, keys[..., : latent.rank], plan, scale=latent.scale, scales=scales)
        outputs = torch.bmm(mixed.transpose(0, 1), self._value_up.mT)
        return self._summed(self.output, outputs.transpose(0, 1).flatten(1), given)


def _halves(before: int, latent: Latent) -> list[int]:
    """The order of a head's numbers in which the pairs of the rotated ones, after so many others, are half of them apart."""
    rotated = range(before, before + latent.rotated)
    return [*range(before), *rotated[::2], *rotated[1::2]] if latent.adjacent else list(range(rotated.stop))


def _keys_and_values(weights: LayerWeights, latent: Latent) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices of the keys [heads, plain, rank] and of the values [heads, value, rank] of all heads.

    GGUF files have those of keys transposed. Safetensors, and old GGUF files, have one tensor with the keys and the values of each head.
    """
    source, prefix = weights.source, f"{weights.prefix}self_attn."
    if source.has(f"{prefix}k_b_proj.weight"):
        keys = source.take(f"{prefix}k_b_proj.weight", latent.heads, latent.rank, latent.plain).mT
        return keys, source.take(f"{prefix}v_b_proj.weight", latent.heads, latent.value, latent.rank)
    found = source.matrix(f"{prefix}kv_b_proj", latent.heads * (latent.plain + latent.value), latent.rank)
    both = multiplied_out(found, weights.dtype).view(latent.heads, -1, latent.rank)
    return both[:, : latent.plain], both[:, latent.plain :]
