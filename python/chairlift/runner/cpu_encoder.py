"""Builds the CPU kernels' encoder from a model's configuration and weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chairlift import _core
from chairlift.checkpoint.safetensors_file import as_float32
from chairlift.errors import UnsupportedModel
from chairlift.models.encoder import EncoderConfig
from chairlift.runner.weights import GGUFWeights, SafetensorWeights, Weights, split_rows

Norm = tuple[np.ndarray, np.ndarray | None]
Layer = tuple[_core.Linear, str, Norm | None]
"""A layer after the pooling: its weights, its activation, and the norm of its output."""
BUCKETS = 32
"""Buckets of distances between tokens in MPNet."""
_PREFIXES = ("", "bert.", "roberta.", "electra.", "gte.", "model.", "auto_model.", "0.auto_model.")
"""What may begin the names of tensors: transformers and sentence-transformers write them with and without the names of their classes."""


def build_encoder(
    model: EncoderConfig, weights: Weights, dtype: str, threads: int, isa: str, longest: int, modules: Path | None
) -> _core.Encoder:
    """Loads and packs all weights. `longest` is the most tokens of a text.

    `modules` is the directory of sentence-transformers' modules; None if `weights` has their tensors. Raises UnsupportedModel for weights
    that do not match the configuration.
    """
    return _Builder(model, weights, dtype, threads, isa).encoder(longest, modules)


def buckets(longest: int) -> NDArray[np.int64]:
    """The buckets of distances from 1 - longest to longest - 1, as in T5 (Raffel et al., 2020); those above 0 have the second half.

    Near distances have buckets of their own, and the others up to 128 share some by their logarithms.
    """
    distances = np.arange(1 - longest, longest)
    half, exact = BUCKETS // 2, BUCKETS // 4
    size = np.abs(distances)
    share = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(128 / exact))
    far = np.minimum(exact + (share * np.float32(half - exact)).astype(np.int64), half - 1)
    return half * (distances > 0) + np.where(size < exact, size, far)


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
        types = self.table(layout.types, model.num_token_types) if layout.types and model.num_token_types else np.zeros(0, dtype=np.float32)
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
                normalized=model.normalized and model.score is None,
                hidden_size=model.hidden_size,
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                norm_eps=model.norm_eps,
                embedding_scale=model.hidden_size**0.5 if layout.scaled_embeddings else 1.0,
                attention_scale=model.attention_scale,
                causal=model.causal,
                distances=self.distances(longest),
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
            norms=self.norms(index, 0),
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
        names, outs = [prefix + name for name in layout.up], inner * (2 if layout.gate else 1)
        return _core.EncoderBlock.mlp(
            norms=self.norms(index, 1),
            up_proj=self.linear(
                names, [outs // len(names)] * len(names), hidden, bias=layout.biases and layout.up_biases, gated=layout.gate is not None
            ),
            down_proj=self.linear([prefix + layout.down], [hidden], inner, bias=layout.biases),
            gate=layout.gate,
        )

    def head(self) -> list[Layer]:
        """A classifier's layers."""
        head, hidden = self.layout.head, self.model.hidden_size
        if head is None:
            raise UnsupportedModel(f"{self.model.architecture} with a classifier is not supported")
        whole = not isinstance(self.weights, GGUFWeights) or self.weights.has(f"{head.dense}.weight")
        # A GGUF file may lack the first layer.
        dense = self.start + head.dense.removeprefix(self.layout.prefix) if self.layout.prefix in head.dense else head.dense
        layers: list[Layer] = [(self.linear([head.out], [1], hidden, bias=True), "identity", None)]
        if whole:
            norm = self.norm(head.norm) if head.norm else None
            layers.insert(0, (self.linear([dense], [hidden], hidden, bias=norm is None), head.activation, norm))
        return layers

    def modules(self, directory: Path | None) -> list[Layer]:
        """The layers of sentence-transformers after the pooling."""
        layers: list[Layer] = []
        for number, layer in enumerate(self.model.dense):
            weights = self.weights if directory is None else SafetensorWeights(directory / layer.path)
            name = f"dense.{number}" if directory is None else "linear"
            part = weights.part(f"{name}.weight", layer.outs, layer.ins)
            bias = as_float32(weights.take(f"{name}.bias", layer.outs)) if layer.bias else None
            layers.append((_core.Linear([[part]], layer.ins, "kept", threads=1, bias=bias, isa=self.isa), layer.activation, None))
        return layers

    def prefix(self, index: int) -> str:
        """What begins the names of a layer's tensors."""
        return self.start + self.layout.layer.format(index)

    def norms(self, index: int, block: int) -> tuple[Norm | None, Norm | None, Norm | None]:
        """The norms of a layer's attention (0) or MLP (1): of the input, of the output and of the sum."""
        layout, prefix = self.layout, self.prefix(index)
        inputs = None if layout.bare_first and index == block == 0 else layout.input_norms
        before, after, total = (
            self.norm(prefix + names[block]) if names else None for names in (inputs, layout.output_norms, layout.sum_norms)
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
        if not self.layout.norm_bias:
            return weight, np.zeros_like(weight)
        return weight, as_float32(self.weights.take(f"{name}.{shift}", size))

    def table(self, name: str, rows: int, first: int = 0) -> np.ndarray:
        """A table of embeddings from row `first` on, flat."""
        table = as_float32(self.weights.take(f"{self.start}{name}.weight", rows, self.model.hidden_size))
        return np.ascontiguousarray(table[first:]).reshape(-1)

    def distances(self, longest: int) -> np.ndarray | None:
        """What is added to each head's scores by how far a key is after its query: [heads, 2 * longest - 1], flat."""
        if self.layout.distances is None:
            return None
        table = as_float32(self.weights.take(f"{self.start}{self.layout.distances}.weight", BUCKETS, self.model.num_heads))
        return np.ascontiguousarray(table[buckets(longest)].T).reshape(-1)

    def linear(self, names: list[str], outs: list[int], ins: int, *, bias: bool, gated: bool = False) -> _core.Linear:
        """Packs several projections of the same input into one layer."""
        sizes = dict(zip(names, outs, strict=True))
        parts = [self.weights.part(f"{name}.weight", size, ins) for name, size in sizes.items()]
        if gated and len(parts) == 1:
            parts = split_rows(parts[0], 2, ins)[:: -1 if self.layout.gate_last else 1]
        biases = np.concatenate([as_float32(self.weights.take(f"{name}.bias", size)) for name, size in sizes.items()]) if bias else None
        try:
            return _core.Linear([[part] for part in parts], ins, self.dtype, threads=self.threads, bias=biases, gated=gated, isa=self.isa)
        except ValueError as error:
            raise UnsupportedModel(f"{', '.join(names)}: {error}") from None
