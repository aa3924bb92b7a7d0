"""The Llama family (Llama, Mistral, Qwen2, Qwen3) over a ragged token axis and a paged cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch.nn import functional

from chairlift.layers.attention import AttentionPlan, paged_attention, write_kv
from chairlift.layers.linear import Linear
from chairlift.layers.norm import rms_norm
from chairlift.layers.rope import inverse_frequencies, rotate, rotations
from chairlift.models.config import ModelConfig


class WeightSource(Protocol):
    """Where a model takes its tensors from, by their Hugging Face names."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of that name, in the dtype and on the device that the model runs in; raises if it is not of that shape."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: T tokens of some sequences; input_ids and positions are integer tensors [T]."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionPlan


class Llama:
    """A decoder whose weights are merged where they share an input (query, key and value; gate and up)."""

    def __init__(self, config: ModelConfig, weights: WeightSource) -> None:
        """Takes every tensor that the model needs from `weights`."""
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", *shape)
        self.layers = [_Layer(config, index, weights) for index in range(config.num_layers)]
        self.norm = weights.take("model.norm.weight", config.hidden_size)
        self.head = Linear(self.embedding if config.tie_word_embeddings else weights.take("lm_head.weight", *shape))
        self.frequencies = inverse_frequencies(config.head_dim, **asdict(config.rope)).to(self.embedding.device)

    def forward(self, step: Step, cache: torch.Tensor) -> torch.Tensor:
        """Runs a step over the cache [layers, blocks, 2, kv_heads, block_size, head_dim]; returns hidden states [T, hidden]."""
        hidden = functional.embedding(step.input_ids, self.embedding)
        cosines, sines = rotations(step.positions, self.frequencies, hidden.dtype)
        for layer, layer_cache in zip(self.layers, cache.unbind(0), strict=True):
            hidden = layer.forward(hidden, cosines, sines, layer_cache, step.attention)
        return hidden

    def logits(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """What a step's hidden states say of the tokens after those at places `at` [N]; returns [N, vocabulary]."""
        return self.head(rms_norm(hidden[at], self.norm, self.config.rms_norm_eps))


class _Layer:
    """One decoder layer: attention, then a gated two-layer network, each added to what it was given."""

    def __init__(self, config: ModelConfig, index: int, weights: WeightSource) -> None:
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.eps, self.window = config.rms_norm_eps, config.windows[index]
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def merged(outs: dict[str, int], width: int, bias: bool) -> Linear:
            """One Linear that computes several projections of the same input at once."""
            names = [f"model.layers.{index}.{name}" for name in outs]
            sizes = list(outs.values())
            parts = [weights.take(f"{name}.weight", size, width) for name, size in zip(names, sizes, strict=True)]
            biases = [weights.take(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)] if bias else []
            return Linear(parts[0] if len(parts) == 1 else torch.cat(parts), torch.cat(biases) if biases else None)

        attention = "self_attn."
        outs = {attention + "q_proj": queries, attention + "k_proj": kv, attention + "v_proj": kv}
        self.qkv = merged(outs, hidden, config.qkv_bias)
        self.output = merged({attention + "o_proj": hidden}, queries, config.output_bias)
        self.gate_up = merged({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias)
        self.down = merged({"mlp.down_proj": hidden}, inner, config.mlp_bias)
        prefix = f"model.layers.{index}."
        self.input_norm = weights.take(prefix + "input_layernorm.weight", hidden)
        self.post_norm = weights.take(prefix + "post_attention_layernorm.weight", hidden)
        self.qk_norm: torch.Tensor | None = None
        if config.qk_norm:
            q = weights.take(prefix + attention + "q_norm.weight", self.head_dim)
            k = weights.take(prefix + attention + "k_norm.weight", self.head_dim)
            self.qk_norm = torch.cat((q.expand(self.heads, -1), k.expand(self.kv_heads, -1)))

    def forward(
        self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Maps hidden states [rows, hidden] to the next layer's."""
        turning = self.heads + self.kv_heads
        qkv = self.qkv(rms_norm(x, self.input_norm, self.eps)).view(x.shape[0], -1, self.head_dim)
        turned = qkv[:, :turning]
        if self.qk_norm is not None:
            turned = functional.rms_norm(turned, (self.head_dim,), eps=self.eps) * self.qk_norm
        turned = rotate(turned, cosines, sines)
        # Stored before read: attention finds this step's keys where it finds all others.
        write_kv(torch.cat((turned[:, self.heads :], qkv[:, turning:]), 1), cache, plan)
        x = x + self.output(paged_attention(turned[:, : self.heads], cache, plan, self.window))
        gate, up = self.gate_up(rms_norm(x, self.post_norm, self.eps)).chunk(2, -1)
        return x + self.down(functional.silu(gate).mul_(up))
