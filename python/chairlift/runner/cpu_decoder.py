"""Builds the CPU kernels' decoder from a model's configuration and weights."""

from __future__ import annotations

import numpy as np

from chairlift import _core
from chairlift.architectures import Projections
from chairlift.checkpoint.safetensors_file import as_float32
from chairlift.errors import UnsupportedModel
from chairlift.models.config import ModelConfig
from chairlift.models.experts import Experts
from chairlift.models.latent import LATENT_EPS, Latent
from chairlift.models.recurrence import RecurrentLayers
from chairlift.runner import expert_weights, recurrent_weights
from chairlift.runner.latent_weights import keys_and_values
from chairlift.runner.weights import Part, Weights, in_memory, slices, split_rows

Norm = np.ndarray | tuple[np.ndarray, np.ndarray]
"""The weight of a norm, or the weight and the bias of a layer norm."""


def build_decoder(model: ModelConfig, weights: Weights, dtype: str, threads: int, isa: str, longest: int) -> _core.Decoder:
    """Loads and packs all weights, matrix by matrix, for the instruction set `isa`. `longest` is the most tokens of a sequence.

    Raises UnsupportedModel for weights that do not match the configuration.
    """
    return _Builder(model, weights, dtype, threads, isa, longest).decoder()


class _Builder:
    """Builds the blocks of one decoder."""

    def __init__(self, model: ModelConfig, weights: Weights, dtype: str, threads: int, isa: str, longest: int) -> None:
        self.model, self.weights, self.dtype, self.longest = model, weights, dtype, longest
        self.threads, self.isa = threads, isa
        self.ropes = list(dict.fromkeys((model.rope, model.local_rope)))

    def decoder(self) -> _core.Decoder:
        """The decoder."""
        model = self.model
        # The largest matrix first: while a matrix is packed, it is in memory twice.
        embedding = self.linear({model.embedding: model.vocab_size}, model.hidden_size)
        # With tied embeddings, embeddings are read from the head's matrix.
        tied = model.tie_word_embeddings and model.classifier is None
        head = embedding if tied else self.head()
        layer_embeddings = self.layer_embeddings(model.variants.input_size) if model.variants and model.variants.input_size else None
        blocks = [block for index in range(model.num_layers) for block in self.layer(index)]
        try:
            return _core.Decoder(
                blocks,
                # The head is linear, so the norm's weight can include the factor of the logits.
                norm=self.stream_norm(model.family.norms.last, model.scales.logits),
                head=head,
                embedding=None if tied else embedding,
                layer_embeddings=layer_embeddings,
                hidden_size=model.hidden_size,
                num_heads=model.num_heads,
                kv_heads=[(*heads, model.latent.rank if model.latent else None) for heads in model.kv_parts],
                rms_norm_eps=model.rms_norm_eps,
                ropes=[(rope.frequencies(self.longest), rope.scale) for rope in self.ropes],
                threads=self.threads,
                positions=self.positions(),
                embedding_scale=model.scales.embedding,
                final_softcap=model.scales.logits_cap,
            )
        except ValueError as error:
            raise UnsupportedModel(f"{model.architecture}: {error}") from None

    def positions(self) -> np.ndarray | None:
        """The embeddings of positions, if the model has them."""
        model, name, unused = self.model, self.model.family.positions, self.model.family.unused_positions
        if name is None:
            return None
        rows = self.weights.take(f"{name}.weight", model.max_position_embeddings + unused, model.hidden_size)
        return as_float32(rows[unused:]).reshape(-1)

    def head(self) -> _core.Linear:
        """The matrix of the logits: that of all tokens, or of a classifier."""
        model, name = self.model, self.model.embedding if self.model.tie_word_embeddings else "lm_head"
        if model.classifier is None:
            return self.linear({name: model.vocab_size}, model.hidden_size, model.family.head_bias)
        if not model.classifier.tokens:
            if self.weights.has("lm_head.weight"):
                self.weights.part("lm_head.weight", model.vocab_size, model.hidden_size)  # not used, and known
            return self.linear({"score": model.classifier.rows}, model.hidden_size)
        yes, no = model.classifier.tokens
        part = self.weights.part(f"{name}.weight", model.vocab_size, model.hidden_size)
        rows = [slices(part, [token, 1], model.hidden_size)[1] for token in (yes, no)]
        return self.pack([[row] for row in rows], name, model.hidden_size)

    def layer(self, index: int) -> list[_core.DecoderBlock]:
        """A layer's blocks."""
        variants = self.model.variants
        scale = float(self.vector(f"model.layers.{index}.layer_scalar", 1)[0]) if variants else 1.0
        if variants and variants.input_size:
            return [self.attention(index), self.feed_forward(index), self.layer_input(index, variants.input_size, scale)]
        blocks, recurrence = [], self.model.recurrence
        if recurrence and recurrence.layers[index]:
            blocks.append(self.recurrent(index, recurrence))
        elif self.model.attention[index]:
            latent = self.model.latent
            blocks.append(self.latent_attention(index, latent) if latent else self.attention(index))
        return [*blocks, self.feed_forward(index, scale)] if self.model.feeds[index] else blocks

    def recurrent(self, index: int, layers: RecurrentLayers) -> _core.DecoderBlock:
        """A layer's recurrent block."""
        model, prefix = self.model, f"model.layers.{index}."
        own = prefix + layers.names.prefix
        matrices = recurrent_weights.projections(self.weights, layers, prefix)
        names = ", ".join(own + name for name in layers.names.projections)
        biases = [self.vector(f"{own}{name}.bias", layers.projected) for name in layers.names.projections] if layers.bias else []
        taps, bias = recurrent_weights.convolution(self.weights, layers, prefix)
        return _core.DecoderBlock.recurrent(
            norm=self.stream_norm(f"{prefix}{model.family.norms.attention}"),
            in_proj=self.pack([[part] for part in matrices], names, model.hidden_size, biases[0] if biases else None),
            taps=taps,
            bias=bias,
            heads=recurrent_weights.heads(self.weights, layers, prefix),
            out_proj=self.linear({own + layers.names.output: model.hidden_size}, layers.width, layers.bias),
            layer=sum(layers.layers[:index]),
            residual_scale=model.scales.residual,
        )

    def attention(self, index: int) -> _core.DecoderBlock:
        """A layer's attention block."""
        model, prefix, kv_place = self.model, f"model.layers.{index}.", self.kv_place(index)
        heads, head_dim = model.heads_of(index)
        queries, kv = model.num_heads * head_dim, heads * head_dim
        projections = model.family.projections
        fused = projections.fused_in(self.weights.has, prefix)
        outs = _named(prefix, (fused,) if fused else projections.qkv, (queries, kv, kv))
        if model.family.projections.gate:
            outs |= {prefix + model.family.projections.gate: queries}
        shared = kv_place[2]
        rope = self.ropes.index(model.rope if model.windows[index] is None else model.local_rope)
        names = (prefix + model.family.norms.query, prefix + model.family.norms.key)
        if shared:
            # There are no keys for the second norm.
            outs, names = _named(prefix, model.family.projections.qkv[:1], (queries,)), names[:1] * 2
        keys_as_values = model.variants is not None and model.variants.keys_as_values and model.windows[index] is None and not shared
        norms = (queries, kv) if model.family.whole_norms else (head_dim, head_dim)
        qk_norm: tuple[Norm, Norm] | None = None
        if model.qk_norm and model.family.centred:
            qk_norm = self.head_norms(names[0], model.num_heads), self.head_norms(names[1], heads)
        elif model.qk_norm:
            qk_norm = self.norm(names[0], norms[0]), self.norm(names[1], norms[1])
        if model.family.gated_queries:
            qkv = self.gated_qkv(outs, head_dim)
        elif projections.by_head and not fused:
            qkv = self.qkv_by_head(next(iter(outs)), head_dim)
        else:
            qkv = self.linear(outs, model.hidden_size, model.qkv_bias, keys_as_values=keys_as_values)
        return _core.DecoderBlock.attention(
            norm=self.input_norm(prefix, model.family.norms.attention),
            qkv_proj=qkv,
            gated=model.family.gated_attention,
            kv=kv_place,
            o_proj=self.linear({prefix + model.family.projections.output: model.hidden_size}, queries, model.output_bias),
            scale=model.scales.attention,
            temperature=model.temperature,
            qk_norm=qk_norm,
            rotated_first=model.family.rotated_first,
            value_norm=np.ones(head_dim, np.float32) if model.variants and not shared else None,
            rope=rope if model.uses_rope[index] else None,
            softcap=model.scales.scores_cap,
            window=model.windows[index],
            sinks=self.vector(f"{prefix}self_attn.sinks", model.num_heads) if model.family.sinks else None,
            post_norm=self.norm(prefix + model.family.norms.after_attention) if model.family.post_norms else None,
            residual_scale=model.scales.residual,
        )

    def latent_attention(self, index: int, latent: Latent) -> _core.DecoderBlock:
        """A layer's block of attention to latents."""
        model, prefix = self.model, f"model.layers.{index}."
        own = f"{prefix}self_attn."
        rank, query_norm, query_up = latent.query_rank, None, None
        outs = {f"{own}q_proj": latent.queries} if rank is None else {f"{own}q_a_proj": rank}
        in_proj = self.linear(outs | {f"{own}kv_a_proj_with_mqa": latent.cached}, model.hidden_size)
        if rank is not None:
            query_norm = self.norm(f"{own}q_a_layernorm", rank)
            query_up = self.linear({f"{own}q_b_proj": latent.queries}, rank)
        keys, values = keys_and_values(self.weights, latent, own)
        return _core.DecoderBlock.latent_attention(
            norm=self.stream_norm(f"{prefix}{model.family.norms.attention}"),
            in_proj=in_proj,
            query_norm=query_norm,
            query_up=query_up,
            latent_norm=self.norm(f"{own}kv_a_layernorm", latent.rank),
            key_up=self.pack([keys], f"{own}k_b_proj", latent.plain),
            value_up=self.pack([values], f"{own}v_b_proj", latent.rank),
            kv=self.kv_place(index),
            o_proj=self.linear({prefix + model.family.projections.output: model.hidden_size}, model.num_heads * latent.value),
            rope=self.ropes.index(model.rope),
            adjacent=latent.adjacent,
            scale=model.scales.attention,
            eps=LATENT_EPS,
        )

    def gated_qkv(self, outs: dict[str, int], head_dim: int) -> _core.Linear:
        """Packs queries, keys, values and gates. The first projection has the query and the gate of one head after another."""
        hidden, (queries, *others) = self.model.hidden_size, outs
        heads = outs[queries] // head_dim
        both = split_rows(self.weights.part(f"{queries}.weight", 2 * outs[queries], hidden), 2 * heads, hidden)
        parts = [*both[::2], *(self.weights.part(f"{name}.weight", outs[name], hidden) for name in others), *both[1::2]]
        return self.pack([[part] for part in parts], ", ".join(outs), hidden)

    def qkv_by_head(self, name: str, head_dim: int) -> _core.Linear:
        """Packs queries, keys and values of a projection that has those of one head after another."""
        heads, hidden = self.model.num_heads, self.model.hidden_size
        pieces = split_rows(self.weights.part(f"{name}.weight", 3 * heads * head_dim, hidden), 3 * heads, hidden)
        bias = self.vector(f"{name}.bias", 3 * heads * head_dim) if self.model.qkv_bias else None
        if bias is not None:
            bias = bias.reshape(heads, 3, head_dim).swapaxes(0, 1).reshape(-1)
        return self.pack([[piece] for part in range(3) for piece in pieces[part::3]], name, hidden, bias)

    def kv_place(self, index: int) -> tuple[int, int, bool]:
        """The part of the KV cache that a layer uses, the layer in that part, and whether it is that of another layer."""
        model = self.model
        source = model.source_of(index)
        heads = model.heads_of(source)
        own = (layer for layer in range(source) if model.source_of(layer) == layer and model.attention[layer])
        before = sum(model.heads_of(layer) == heads for layer in own)
        return list(model.kv_parts).index(heads), before, source != index

    def layer_embeddings(self, size: int) -> tuple[_core.Linear, _core.Linear, np.ndarray]:
        """The embeddings of tokens for each layer: table, projection and norm."""
        model = self.model
        every = model.num_layers * size
        table = self.linear({"model.embed_tokens_per_layer": model.vocab_size}, every)
        projection = self.linear({"model.per_layer_model_projection": every}, model.hidden_size)
        return table, projection, self.norm("model.per_layer_projection_norm", size)

    def layer_input(self, index: int, size: int, scale: float) -> _core.DecoderBlock:
        """The block that adds the embeddings of a layer."""
        prefix, hidden = f"model.layers.{index}.", self.model.hidden_size
        return _core.DecoderBlock.layer_input(
            gate=self.linear({f"{prefix}per_layer_input_gate": size}, hidden),
            projection=self.linear({f"{prefix}per_layer_projection": hidden}, size),
            layer=index,
            activation=self.model.activation,
            post_norm=self.norm(f"{prefix}post_per_layer_input_norm"),
            stream_scale=scale,
        )

    def feed_forward(self, index: int, scale: float = 1.0) -> _core.DecoderBlock:
        """A layer's mixture of experts or its MLP, after which the residual stream is multiplied by `scale`."""
        experts = self.model.experts
        return self.mixture(index, experts, scale) if experts and experts.layers[index] else self.mlp(index, scale)

    def mixture(self, index: int, experts: Experts, scale: float) -> _core.DecoderBlock:
        """A layer's mixture of experts."""
        model, prefix, names = self.model, f"model.layers.{index}.", experts.names
        hidden, shared = model.hidden_size, None
        if names.shared and (inner := experts.shared_inner):
            outs = self.gate_up(prefix, names.shared, inner)
            shared = self.linear(outs, hidden, gated=model.gated), self.linear({prefix + names.shared.down: hidden}, inner)
        biases = expert_weights.biases(self.weights, experts, prefix, hidden) if names.biases else (None, None)
        # The first matrices are packed before the second are read: those of quantized checkpoints are in memory meanwhile, in fp32.
        gate_up_proj = self.pack(
            expert_weights.gate_and_up(self.weights, experts, prefix, hidden), f"{prefix}experts", hidden, biases[0], gated=model.gated
        )
        downs = expert_weights.down(self.weights, experts, prefix, hidden)
        router = in_memory(expert_weights.router(self.weights, experts, prefix, hidden))
        bias = self.vector(f"{prefix}{names.router}.bias", experts.count) if names.biases else None
        choice = experts.choice_bias(self.weights.has, prefix)
        return _core.DecoderBlock.mixture(
            norm=self.input_norm(prefix, model.mlp_norm),
            parallel=model.parallel,
            router=_core.Linear([[router]], hidden, "float32", threads=self.threads, bias=bias, isa=self.isa),
            gate_up_proj=gate_up_proj,
            down_proj=self.pack([downs], f"{prefix}experts", experts.inner, biases[1]),
            scores=names.scores.value,
            used=experts.used,
            bias=as_float32(self.weights.take(choice[0], *choice[1])).reshape(-1) if choice else None,
            groups=(*experts.groups, names.best or 1) if experts.groups else None,
            normalised=names.epsilon if experts.normalised else None,
            scale=experts.scale,
            clamp=experts.clamp,
            expert_scales=self.vector(f"{prefix}router.per_expert_scale", experts.count) if names.own_norms else None,
            shared=shared,
            shared_gate=names.shared_gate is not None,
            norms=self.mixture_norms(prefix) if names.own_norms else None,
            activation=model.activation,
            post_norm=self.norm(prefix + model.family.norms.after_mlp) if model.family.post_norms else None,
            residual_scale=model.scales.residual,
            stream_scale=scale,
        )

    def mixture_norms(self, prefix: str) -> list[np.ndarray]:
        """The norms of Gemma 4's router, of its experts' input and output, and of the output of the MLP beside them."""
        hidden = self.model.hidden_size
        router = self.vector(f"{prefix}router.scale", hidden) * np.float32(hidden**-0.5)
        names = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
        return [router, *(self.norm(prefix + name) for name in names)]

    def mlp(self, index: int, scale: float = 1.0) -> _core.DecoderBlock:
        """A layer's MLP block, after which the residual stream is multiplied by `scale`."""
        model, prefix = self.model, f"model.layers.{index}."
        hidden, inner = model.hidden_size, model.inner_of(index)
        outs = self.gate_up(prefix, model.family.projections, inner)
        return _core.DecoderBlock.mlp(
            norm=self.input_norm(prefix, model.mlp_norm),
            parallel=model.parallel,
            gate_up_proj=self.linear(outs, hidden, model.mlp_bias, gated=model.gated),
            down_proj=self.linear({prefix + model.family.projections.down: hidden}, inner, model.mlp_bias),
            activation=model.activation,
            post_norm=self.norm(prefix + model.family.norms.after_mlp) if model.family.post_norms else None,
            residual_scale=model.scales.residual,
            stream_scale=scale,
        )

    def gate_up(self, prefix: str, names: Projections, inner: int) -> dict[str, int]:
        """The tensors of gate and up, or of up alone if there is no gate, and the number of rows of each."""
        fused = not names.apart or self.weights.has(f"{prefix}{names.gate_up[0]}.weight")
        return _named(prefix, names.gate_up if fused else names.apart, (inner,) * (2 if self.model.gated else 1))

    def input_norm(self, prefix: str, name: str | None) -> Norm | None:
        """The norm before a block of a layer; None if the architecture has none."""
        return None if name is None else self.stream_norm(prefix + name)

    def stream_norm(self, name: str, factor: float = 1.0) -> Norm:
        """A norm of the residual stream, whose result is multiplied by `factor`."""
        weight, family = self.norm(name) * np.float32(factor), self.model.family
        if not family.centred:
            return weight
        return weight, self.vector(f"{name}.bias", len(weight)) * np.float32(factor) if family.norm_biases else np.zeros_like(weight)

    def head_norms(self, name: str, heads: int) -> Norm:
        """The layer norms of heads, which StableLM has in a tensor each."""
        model, size = self.model, self.model.head_dim
        if self.weights.has(f"{name}.weight"):
            rows = as_float32(self.weights.take(f"{name}.weight", heads, size))
        else:
            rows = np.stack([self.vector(f"{name}.norms.{head}.weight", size) for head in range(heads)])
        weight = rows[:, model.head_order].reshape(-1)
        return weight, np.zeros_like(weight)

    def vector(self, name: str, size: int) -> np.ndarray:
        """A one-dimensional tensor."""
        return as_float32(self.weights.take(name, size))

    def norm(self, name: str, size: int | None = None) -> np.ndarray:
        """The weight of a norm; `size` is hidden_size by default."""
        return self.vector(f"{name}.weight", size or self.model.hidden_size) + np.float32(self.model.family.norm_offset)

    def linear(self, outs: dict[str, int], ins: int, bias: bool = False, gated: bool = False, keys_as_values: bool = False) -> _core.Linear:
        """Packs several projections of the same input into one layer. With `keys_as_values` the last is the one before it."""
        names = list(outs)
        if keys_as_values:
            names[-1] = names[-2]
        parts = [part for name in names for part in self.in_halves(name, self.weights.part(f"{name}.weight", outs[name], ins), ins)]
        if gated and len(parts) == 1:
            parts = split_rows(parts[0], 2, ins)
        biases = np.concatenate([self.bias(name, size) for name, size in outs.items()]) if bias else None
        return self.pack([[part] for part in parts], ", ".join(outs), ins, biases, gated)

    def in_halves(self, name: str, part: Part, ins: int) -> list[Part]:
        """A projection's matrix, in which the halves of the rotated rows of a head do not alternate."""
        model = self.model
        if not (model.family.adjacent_pairs and _is_rotated(name)):
            return [part]
        rotated, rest = model.rope.dim, model.head_dim - model.rope.dim
        if not rest:
            return [(*part[:3], rotated)]
        pieces = slices(part, [rotated, rest] * (part[1] // model.head_dim), ins)
        return [(*piece[:3], 0 if index % 2 else rotated) for index, piece in enumerate(pieces)]

    def bias(self, name: str, size: int) -> np.ndarray:
        """The bias of a projection, in the order of the rows of its matrix."""
        bias, model = self.vector(f"{name}.bias", size), self.model
        if model.family.adjacent_pairs and _is_rotated(name):
            bias = bias.reshape(-1, model.head_dim)[:, model.head_order].reshape(-1)
        return bias

    def pack(self, parts: list[list[Part]], names: str, ins: int, biases: np.ndarray | None = None, gated: bool = False) -> _core.Linear:
        """Packs matrices of the same input, each of which is one of every expert or a single one."""
        try:
            packed = _core.Linear(parts, ins, self.dtype, threads=self.threads, bias=biases, gated=gated, isa=self.isa)
        except ValueError as error:
            raise UnsupportedModel(f"{names}: {error}") from None
        self.weights.release()
        return packed


def _is_rotated(name: str) -> bool:
    """Whether a projection makes queries or keys."""
    return name.endswith(("q_proj", "k_proj"))


def _named(prefix: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """Returns the tensors of several projections and the number of rows of each."""
    return {f"{prefix}{name}": size for name, size in zip(names, sizes if len(names) > 1 else (sum(sizes),), strict=True)}
