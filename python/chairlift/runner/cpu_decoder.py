"""A model's blocks for the CPU's kernels, described by its configuration."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from chairlift import _core
from chairlift.errors import UnsupportedModel
from chairlift.layers.rope import inverse_frequencies
from chairlift.models.config import ModelConfig
from chairlift.runner.weights import DummyWeights, GGUFWeights, SafetensorWeights


def build_decoder(model: ModelConfig, weights: SafetensorWeights | GGUFWeights | DummyWeights, form: str, threads: int) -> _core.Decoder:
    """Takes and packs all weights, matrix by matrix. Raises UnsupportedModel for weights that do not belong to the configuration."""
    return _Builder(model, weights, form, threads).decoder()


class _Builder:
    """Makes the parts of one decoder."""

    def __init__(self, model: ModelConfig, weights: SafetensorWeights | GGUFWeights | DummyWeights, form: str, threads: int) -> None:
        self.model, self.weights, self.form, self.threads = model, weights, form, threads
        self.ropes = list(dict.fromkeys((model.rope, model.local_rope)))

    def decoder(self) -> _core.Decoder:
        """The whole."""
        model = self.model
        # The largest first: while one is packed it is there twice.
        embedding = self.linear({"model.embed_tokens": model.vocab_size}, model.hidden_size)
        # Tied, the head's matrix is where embeddings are read too.
        tied = model.tie_word_embeddings
        head = embedding if tied else self.linear({"lm_head": model.vocab_size}, model.hidden_size)
        blocks = [block for index in range(model.num_layers) for block in (self.attention(index), self.mlp(index))]
        try:
            return _core.Decoder(
                blocks,
                norm=self.norm("model.norm"),
                head=head,
                embedding=None if tied else embedding,
                hidden_size=model.hidden_size,
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                rms_norm_eps=model.rms_norm_eps,
                ropes=[(inverse_frequencies(model.head_dim, **asdict(rope)).numpy(), 1.0) for rope in self.ropes],
                threads=self.threads,
                embedding_scale=model.embedding_scale,
                final_softcap=model.final_softcap,
            )
        except ValueError as error:
            raise UnsupportedModel(f"{model.architecture}: {error}") from None

    def attention(self, index: int) -> _core.DecoderBlock:
        """A layer's attention."""
        model, prefix = self.model, f"model.layers.{index}."
        queries, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        outs = {f"{prefix}self_attn.q_proj": queries, f"{prefix}self_attn.k_proj": kv, f"{prefix}self_attn.v_proj": kv}
        names = (f"{prefix}self_attn.q_norm", f"{prefix}self_attn.k_norm")
        return _core.DecoderBlock.attention(
            norm=self.norm(prefix + "input_layernorm"),
            qkv_proj=self.linear(outs, model.hidden_size, model.qkv_bias),
            o_proj=self.linear({f"{prefix}self_attn.o_proj": model.hidden_size}, queries, model.output_bias),
            scale=model.attention_scale,
            qk_norm=(self.norm(names[0], model.head_dim), self.norm(names[1], model.head_dim)) if model.qk_norm else None,
            rope=self.ropes.index(model.rope if model.windows[index] is None else model.local_rope),
            softcap=model.attention_softcap,
            window=model.windows[index],
            post_norm=self.norm(prefix + "post_attention_layernorm") if model.post_norms else None,
        )

    def mlp(self, index: int) -> _core.DecoderBlock:
        """A layer's gated network."""
        model, prefix = self.model, f"model.layers.{index}."
        hidden, inner = model.hidden_size, model.intermediate_size
        outs = {f"{prefix}mlp.gate_proj": inner, f"{prefix}mlp.up_proj": inner}
        return _core.DecoderBlock.gated_mlp(
            # The norm behind attention has the name that elsewhere is that of the one before the network.
            norm=self.norm(prefix + ("pre_feedforward_layernorm" if model.post_norms else "post_attention_layernorm")),
            gate_up_proj=self.linear(outs, hidden, model.mlp_bias, gated=True),
            down_proj=self.linear({f"{prefix}mlp.down_proj": hidden}, inner, model.mlp_bias),
            activation=model.activation,
            post_norm=self.norm(prefix + "post_feedforward_layernorm") if model.post_norms else None,
        )

    def vector(self, name: str, size: int) -> np.ndarray:
        """A tensor of one dimension."""
        taken: np.ndarray = self.weights.take(name, size).float().numpy()
        return taken

    def norm(self, name: str, size: int | None = None) -> np.ndarray:
        """The weight of a norm of hidden states, or of vectors of a size."""
        return self.vector(f"{name}.weight", size or self.model.hidden_size) + np.float32(self.model.norm_offset)

    def linear(self, outs: dict[str, int], ins: int, bias: bool = False, gated: bool = False) -> _core.Linear:
        """One layer for several projections of the same input."""
        parts = [self.weights.part(f"{name}.weight", size, ins) for name, size in outs.items()]
        biases = np.concatenate([self.vector(f"{name}.bias", size) for name, size in outs.items()]) if bias else None
        try:
            return _core.Linear(parts, ins, self.form, threads=self.threads, bias=biases, gated=gated)
        except ValueError as error:
            raise UnsupportedModel(f"{', '.join(outs)}: {error}") from None
