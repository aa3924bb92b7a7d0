"""The Llama family (Llama, Mistral, Qwen2 and 3, Gemma 2 and 3) over a ragged token axis and a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch.nn import functional

from chairlift.errors import UnsupportedModel
from chairlift.layers.activation import act_mul
from chairlift.layers.attention import AttentionPlan, Scales, paged_attention
from chairlift.layers.linear import Linear
from chairlift.layers.norm import add_rms_norm, rms_norm
from chairlift.layers.rope import inverse_frequencies, rope_write, rotations
from chairlift.layers.tensor_parallel import ALONE, TensorParallelGroup
from chairlift.models.config import ModelConfig

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""One layer's keys [blocks, kv_heads, block_size, head_dim] and values [blocks, kv_heads, block_size, value_dim]."""


class WeightSource(Protocol):
    """Where a model takes its tensors from, by their Hugging Face names."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of that name, in the dtype and on the device that the model runs in; raises if it is not of that shape."""
        ...

    def scales(self, name: str, heads: int) -> torch.Tensor | None:
        """The scales of that name on the device that the model runs in, fp32 [heads]; None if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: T tokens of some sequences; input_ids and positions are integer tensors [T]."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionPlan


class Llama:
    """A decoder whose weights are merged where they share an input (query, key and value; gate and up)."""

    def __init__(self, config: ModelConfig, weights: WeightSource, peers: TensorParallelGroup = ALONE, form: str | None = None) -> None:
        """Takes every tensor that the model needs from `weights`; of a model that `peers` share, both are what this process has of it.

        With a `form` the layers' matrices are kept in 8 bits (see `Linear`). Embeddings and the head, often one and the same, are not:
        theirs are the errors that show most, and they are read a row at a time, or once a step. Raises UnsupportedModel for what only
        the CPU's kernels compute.
        """
        if config.only_in_rust:
            raise UnsupportedModel(f"{config.architecture} has no code of ours in torch")
        self.peers = peers
        self.eps, self.softcap = config.rms_norm_eps, config.final_softcap
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", *shape)
        # Rounded like the embeddings that it multiplies, as in training.
        self.scale = torch.tensor(config.embedding_scale, dtype=self.embedding.dtype).item()
        before = [f"model.layers.{index}.input_layernorm.weight" for index in range(config.num_layers)]
        self.norm, *after = (_norm(config, weights, name) for name in (*before, "model.norm.weight"))
        self.layers = [_Layer(config, index, weights, norm, peers, form) for index, norm in enumerate(after)]
        self.head = Linear(peers.part(self.embedding) if config.tie_word_embeddings else weights.take("lm_head.weight", *shape))
        ropes = {config.rope, config.local_rope}
        device = self.embedding.device
        self.frequencies = {rope: inverse_frequencies(config.head_dim, **asdict(rope)).to(device) for rope in ropes}

    def forward(self, step: Step, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Runs a step over each layer's cache; returns hidden states [T, hidden]."""
        residual = functional.embedding(step.input_ids, self.embedding)
        if self.scale != 1:
            residual.mul_(self.scale)
        rotation = {rope: rotations(step.positions, frequencies) for rope, frequencies in self.frequencies.items()}
        x = rms_norm(residual, self.norm, self.eps)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer.forward(x, residual, rotation[layer.rope], layer_cache, step.attention)
        return x

    def logits(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """What a step's hidden states say of the tokens after those at places `at` [N]; returns [N, vocabulary]."""
        logits = self.peers.join(self.head(hidden[at]), len(self.embedding))
        return logits if self.softcap is None else logits.float().div_(self.softcap).tanh_().mul_(self.softcap)


class _Layer:
    """One decoder layer: attention, then a gated two-layer network, each added to the residual stream."""

    def __init__(
        self, config: ModelConfig, index: int, weights: WeightSource, next_norm: torch.Tensor, peers: TensorParallelGroup, form: str | None
    ) -> None:
        """`next_norm` is the norm of what comes after this layer."""
        self.peers = peers
        self.head_dim, self.eps, self.activation = config.head_dim, config.rms_norm_eps, config.activation
        self.window, self.scale, self.softcap = config.windows[index], config.attention_scale, config.attention_softcap
        self.rope = config.rope if self.window is None else config.local_rope
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, kv = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        prefix = f"model.layers.{index}."

        def merged(outs: dict[str, int], width: int, bias: bool) -> Linear:
            """One Linear that computes several projections of the same input at once."""
            parts = [weights.take(f"{prefix}{name}.weight", size, width) for name, size in outs.items()]
            biases = [weights.take(f"{prefix}{name}.bias", size) for name, size in outs.items()] if bias else []
            return Linear(parts[0] if len(parts) == 1 else torch.cat(parts), torch.cat(biases) if biases else None, form)

        def norm(name: str) -> torch.Tensor:
            return _norm(config, weights, f"{prefix}{name}.weight")

        outs = {"self_attn.q_proj": queries, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        self.qkv = merged(outs, hidden, config.qkv_bias)
        self.output = merged({"self_attn.o_proj": hidden}, queries, config.output_bias)
        self.gate_up = merged({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias)
        self.down = merged({"mlp.down_proj": hidden}, inner, config.mlp_bias)
        self.scales = kv_scales(weights, index, config.num_kv_heads)
        self.qk_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None
        # The norm behind attention has the name that elsewhere is that of the one before the network.
        self.attention_norm = norm("post_attention_layernorm") if config.post_norms else None
        self.mlp_norm = norm("post_feedforward_layernorm") if config.post_norms else None
        self.norm = norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm")
        self.next_norm = next_norm

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Adds to `residual` [rows, hidden] what this layer makes of x, its norm; returns the norm of the sum, for what comes next."""
        keys, values = cache
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        # Stored before read: attention finds this step's keys where it finds all others.
        scales = self.scales if keys.dtype == torch.float8_e4m3fn else None
        query = rope_write(qkv, rotation, keys, values, plan, norms=self.qk_norms, eps=self.eps, scales=scales)
        x = paged_attention(query, keys, values, plan, window=self.window, scale=self.scale, softcap=self.softcap, scales=scales)
        x = add_rms_norm(self.peers.sum(self.output(x.flatten(1))), residual, self.norm, self.eps, inner=self.attention_norm)
        x = self.peers.sum(self.down(act_mul(self.gate_up(x), self.activation)))
        return add_rms_norm(x, residual, self.next_norm, self.eps, inner=self.mlp_norm)


def _norm(config: ModelConfig, weights: WeightSource, name: str) -> torch.Tensor:
    """The weight of a norm; in fp32 if the checkpoint's is a difference, since the sum has more digits."""
    weight = weights.take(name, config.head_dim if "self_attn" in name else config.hidden_size)
    return weight.float() + config.norm_offset if config.norm_offset else weight


def kv_scales(weights: WeightSource, layer: int, heads: int) -> Scales | None:
    """The scales of a layer's keys and values in 8 bits, under any of the names that vLLM knows for them; None if there are neither."""
    prefix = f"model.layers.{layer}.self_attn."
    names = {kind: (f"{prefix}{kind}_scale", f"{prefix}attn.{kind}_scale", f"{prefix}{kind}_proj.{kind}_scale") for kind in "kv"}
    k, v = (next((found for name in names[kind] if (found := weights.scales(name, heads)) is not None), None) for kind in "kv")
    # One without the other leaves that as it is.
    if k is None:
        return None if v is None else (torch.ones_like(v), v)
    return k, torch.ones_like(k) if v is None else v
