"""Builds the CPU kernels' encoder from a model's configuration and weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chairlift import _core
from chairlift.checkpoint.safetensors_file import as_float32
from chairlift.errors import UnsupportedModel
from chairlift.models.encoder import EncoderConfig
from chairlift.runner.weights import GGUFWeights, SafetensorWeights, Weights

Norm = tuple[np.ndarray, np.ndarray | None]
_PREFIXES = ("", "bert.", "roberta.", "model.", "auto_model.", "0.auto_model.")
"""What may begin the names of tensors: transformers and sentence-transformers write them with and without the names of their classes."""


def build_encoder(
    model: EncoderConfig, weights: Weights, dtype: str, threads: int, isa: str, longest: int, modules: Path | None
) -> _core.Encoder:
    """Loads and packs all weights. `longest` is the most tokens of a text.

    `modules` is the directory of sentence-transformers' modules; None if `weights` has their tensors. Raises UnsupportedModel for weights
    that do not match the configuration.
    """
    return _Builder(model, weights, dtype, threads, isa).encoder(longest, modules)


class _Builder:
    """Builds the blocks of one encoder."""

    def __init__(self, model: EncoderConfig, weights: Weights, dtype: str, threads: int, isa: str) -> None:
        self.model, self.layout, self.weights = model, model.layout, weights
        self.dtype, self.threads, self.isa = dtype, threads, isa
        prefixes = (self.layout.prefix, *_PREFIXES)
        self.start = next((start for start in prefixes if weights.has(f"{start}{self.layout.tokens}.weight")), self.layout.prefix)
        """What begins the names of all tensors but those of a classifier."""
        self.ropes = list(dict.fromkeys(rope for rope in (model.rope, model.local_rope) if rope))

    def encoder(self, longest: int, modules: Path | None) -> _core.Encoder:
        """The encoder."""
        model, layout = self.model, self.layout
        tokens = self.linear([f"{self.start}{layout.tokens}"], [model.vocab_size], model.hidden_size, bias=False)
        blocks = [block for index in range(model.num_layers) for block in (self.attention(index), self.mlp(index))]
        types = self.table(layout.types, model.num_token_types) if layout.types else np.zeros(0, dtype=np.float32)
        try:
            return _core.Encoder(
                blocks,
                tokens=tokens,
                positions=self.table(layout.positions, model.num_positions, model.first_position) if layout.positions else None,
                types=types,
                embedding_norm=self.norm(f"{self.start}{layout.embedding_norm}") if layout.embedding_norm else None,
                final_norm=self.norm(f"{self.start}{layout.final_norm}") if layout.final_norm else None,
                pooling=model.pooling,
                dense=self.head() if model.score else self.modules(modules),
                normalized=model.score is None,
                hidden_size=model.hidden_size,
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                norm_eps=model.norm_eps,
                embedding_scale=model.hidden_size**0.5 if layout.scaled_embeddings else 1.0,
                attention_scale=model.attention_scale,
                causal=model.causal,
                ropes=[rope.frequencies(longest) for rope in self.ropes],
                longest=longest,
                threads=self.threads,
            )
        except ValueError as error:
            raise UnsupportedModel(f"{model.architecture}: {error}") from None

    def attention(self, index: int) -> _core.EncoderBlock:
        """A layer's attention."""
        model, layout, prefix = self.model, self.layout, self.prefix(index)
        queries, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        outs = [queries, kv, kv] if len(layout.qkv) > 1 else [queries + 2 * kv]
        rope = model.rope if model.windows[index] is None else model.local_rope
        return _core.EncoderBlock.attention(
            norms=self.norms(prefix, 0),
            qkv_proj=self.linear([prefix + name for name in layout.qkv], outs, model.hidden_size, bias=model.qkv_bias),
            o_proj=self.linear([prefix + layout.output], [model.hidden_size], queries, bias=layout.biases),
            qk_norm=self.qk_norms(prefix),
            rope=self.ropes.index(rope) if rope else None,
            window=model.windows[index],
        )

    def mlp(self, index: int) -> _core.EncoderBlock:
        """A layer's MLP."""
        model, layout, prefix = self.model, self.layout, self.prefix(index)
        hidden, inner = model.hidden_size, model.intermediate_size
        names = [prefix + name for name in layout.up]
        return _core.EncoderBlock.mlp(
            norms=self.norms(prefix, 1),
            up_proj=self.linear(names, [inner] * len(names), hidden, bias=layout.biases, gated=layout.gate is not None),
            down_proj=self.linear([prefix + layout.down], [hidden], inner, bias=layout.biases),
            gate=layout.gate,
        )

    def head(self) -> list[tuple[_core.Linear, str]]:
        """A classifier's layers."""
        head, hidden = self.layout.head, self.model.hidden_size
        if head is None:
            raise UnsupportedModel(f"{self.model.architecture} with a classifier is not supported")
        whole = not isinstance(self.weights, GGUFWeights) or self.weights.has(f"{head.dense}.weight")
        # A GGUF file may lack the first layer.
        dense = self.start + head.dense.removeprefix(self.layout.prefix) if self.layout.prefix in head.dense else head.dense
        layers = [(dense, hidden, head.activation)] if whole else []
        layers.append((head.out, 1, "identity"))
        return [(self.linear([name], [outs], hidden, bias=True), activation) for name, outs, activation in layers]

    def modules(self, directory: Path | None) -> list[tuple[_core.Linear, str]]:
        """The layers of sentence-transformers after the pooling."""
        layers: list[tuple[_core.Linear, str]] = []
        for number, layer in enumerate(self.model.dense):
            weights = self.weights if directory is None else SafetensorWeights(directory / layer.path)
            name = f"dense.{number}" if directory is None else "linear"
            part = weights.part(f"{name}.weight", layer.outs, layer.ins)
            bias = as_float32(weights.take(f"{name}.bias", layer.outs)) if layer.bias else None
            layers.append((_core.Linear([[part]], layer.ins, "kept", threads=1, bias=bias, isa=self.isa), layer.activation))
        return layers

    def prefix(self, index: int) -> str:
        """What begins the names of a layer's tensors."""
        return self.start + self.layout.layer.format(index)

    def norms(self, prefix: str, block: int) -> tuple[Norm | None, Norm | None, Norm | None]:
        """The norms of a layer's attention (0) or MLP (1): of the input, of the output and of the sum."""
        layout = self.layout
        before, after, total = (
            self.norm(prefix + names[block]) if names else None for names in (layout.input_norms, layout.output_norms, layout.sum_norms)
        )
        return before, after, total

    def qk_norms(self, prefix: str) -> tuple[np.ndarray, np.ndarray] | None:
        """The weights of the query norm and the key norm."""
        if self.layout.qk_norms is None:
            return None
        query, key = (self.norm(prefix + name, self.model.head_dim)[0] for name in self.layout.qk_norms)
        return query, key

    def norm(self, name: str, size: int | None = None) -> Norm:
        """A norm; `size` is hidden_size by default. `norm_offset` is added to the weights of root-mean-square norms."""
        size = size or self.model.hidden_size
        # Checkpoints that were made of TensorFlow's, such as bert-base-uncased, have gamma and beta.
        scale, shift = (
            ("gamma", "beta") if self.weights.has(f"{name}.gamma") and not self.weights.has(f"{name}.weight") else ("weight", "bias")
        )
        weight = as_float32(self.weights.take(f"{name}.{scale}", size))
        if self.layout.rms:
            return weight + np.float32(self.layout.norm_offset), None
        return weight, as_float32(self.weights.take(f"{name}.{shift}", size))

    def table(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        """A table of embeddings from row `first` on, flat."""
        table = as_float32(self.weights.take(f"{self.start}{name}.weight", rows, self.model.hidden_size))
        return np.ascontiguousarray(table[first:]).reshape(-1)

    def linear(self, names: list[str], outs: list[int], ins: int, *, bias: bool, gated: bool = False) -> _core.Linear:
        """Packs several projections of the same input into one layer."""
        sizes = dict(zip(names, outs, strict=True))
        parts = [self.weights.part(f"{name}.weight", size, ins) for name, size in sizes.items()]
        biases = np.concatenate([as_float32(self.weights.take(f"{name}.bias", size)) for name, size in sizes.items()]) if bias else None
        try:
            return _core.Linear([[part] for part in parts], ins, self.dtype, threads=self.threads, bias=biases, gated=gated, isa=self.isa)
        except ValueError as error:
            raise UnsupportedModel(f"{', '.join(names)}: {error}") from None
