"""Parses and checks a checkpoint's config.json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chairlift.architectures import HEADLESS, QWEN3, Architecture, Code
from chairlift.errors import UnsupportedModel, pip_install_with_torch
from chairlift.models.classifier import Classifier
from chairlift.models.entries import check_beside, check_entries
from chairlift.models.experts import EXPERTS, Experts, parse_experts
from chairlift.models.family import check_supported, find_family, parse_activation
from chairlift.models.fields import (
    Entries,
    NoNativeModel,
    parse_count,
    parse_dtype,
    parse_layers,
    parse_names,
    parse_number,
    parse_size,
    read_json,
)
from chairlift.models.heads import parse_heads
from chairlift.models.latent import Latent
from chairlift.models.layer_variants import LayerVariants
from chairlift.models.quantization import QuantizationScheme, described_beside
from chairlift.models.recurrence import ATTENTION, FEEDS, RecurrentLayers, list_layers, parse_recurrence
from chairlift.models.rope_config import longest_context, parse_ropes, parse_temperature, unknown_rope
from chairlift.models.rotary import Dynamic, RopeConfig
from chairlift.models.scales import Scales, parse_scales
from chairlift.models.shape import KvSpec, ModelShape
from chairlift.models.windows import parse_rope_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """The configuration of a model of the Llama family.

    `family` has what config.json does not say. `windows` has one entry per layer: the number of tokens that a token sees, itself included;
    None means all. Layers with a window use `local_rope`. With a temperature (b, n) the query at position p is multiplied by 1 + b * ln(1 +
    floor(p / n)). Heads are rotated in the layers selected by `uses_rope`. In a `parallel` model MLPs read the residual stream that
    attention reads. With `variants` layers have different heads (see `LayerVariants`). `attention` says which layers have attention, and
    `feeds` which have an MLP of `intermediate_size` or experts. With a `recurrence` some layers have a state instead of keys and values,
    and with `experts` some have a mixture of experts. With a `latent` keys and values are made of one vector a token. `scheme` is that of
    quantised layers. A checkpoint has `later_layers` after the last one, which predict tokens beyond the next one and are not used. With a
    `classifier` the model scores pairs of texts and generates none. A `headless` model computes embeddings alone. `embedding` is the name
    of the embeddings' matrix.
    """

    family: Architecture
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    parallel: bool
    activation: str
    windows: tuple[int | None, ...]
    local_rope: RopeConfig
    scales: Scales
    temperature: tuple[float, int] | None
    uses_rope: tuple[bool, ...]
    attention: tuple[bool, ...]
    feeds: tuple[bool, ...]
    recurrence: RecurrentLayers | None
    latent: Latent | None
    experts: Experts | None
    variants: LayerVariants | None
    only_in_rust: bool
    later_layers: int
    scheme: QuantizationScheme | None = None
    classifier: Classifier | None = None
    headless: bool = False
    embedding: str = "model.embed_tokens"

    @property
    def head_size(self) -> int:
        """The number of logits: that of tokens, or of a classifier's rows."""
        return self.classifier.rows if self.classifier else self.vocab_size

    @property
    def embedding_size(self) -> int:
        """The numbers of a text's result."""
        return 1 if self.classifier else self.hidden_size

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """The shape of the KV cache of each layer that has one."""
        own = [layer for layer in range(self.num_layers) if self.source_of(layer) == layer and self.attention[layer]]
        heads = [(layer, *self.heads_of(layer)) for layer in own]
        return tuple(KvSpec(count, size, 0 if self.latent else size, self.windows[layer]) for layer, count, size in heads)

    @property
    def kv_parts(self) -> dict[tuple[int, int], int]:
        """The number of layers with each number and size of KV heads, without those that use the keys and values of others."""
        return Counter((spec.kv_heads, spec.head_dim) for spec in self.kv_specs)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of a sequence."""
        return self.recurrence.state_bytes if self.recurrence else 0

    @property
    def head_order(self) -> list[int]:
        """The order of the numbers of a head of queries and keys in which rotated pairs are half the rotated part apart."""
        rotated = self.rope.dim
        pairs = [*range(0, rotated, 2), *range(1, rotated, 2)] if self.family.adjacent_pairs else [*range(rotated)]
        return [*pairs, *range(rotated, self.head_dim)]

    @property
    def gated(self) -> bool:
        """Whether MLPs and experts have a gate."""
        return self.family.gated

    @property
    def mlp_norm(self) -> str | None:
        """The name of the norm before an MLP or experts; None if there is none."""
        return self.family.norms.parallel if self.parallel else self.family.norms.mlp

    @property
    def expert_counts(self) -> tuple[int, int]:
        """The number of experts of a layer, and of those that a token uses."""
        return (self.experts.count, self.experts.used) if self.experts else (0, 0)

    @property
    def expert_weights(self) -> int:
        """The number of parameters of all experts that tokens choose."""
        return sum(self.experts.layers) * self.experts.routed_weights(self.hidden_size) if self.experts else 0

    def heads_of(self, layer: int) -> tuple[int, int]:
        """The number and the size of a layer's KV heads."""
        return self.variants.local_heads if self.variants and self.windows[layer] is not None else (self.num_kv_heads, self.head_dim)

    def source_of(self, layer: int) -> int:
        """The layer whose keys and values a layer uses: mostly itself."""
        first = self.num_layers - (self.variants.shared if self.variants else 0)
        if layer < first:
            return layer
        return max(other for other in range(first) if (self.windows[other] is None) == (self.windows[layer] is None))

    def inner_of(self, layer: int) -> int:
        """The inner size of a layer's MLP."""
        return self.intermediate_size * (2 if self.variants and self.variants.wide and self.source_of(layer) != layer else 1)

    def matrices_of(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of a layer's matrices: merged query, key and value; attention output; merged gate and up; down.

        The first two of a recurrent layer are its projections, and the first ones of attention to latents are its own. A layer with experts
        has the MLP of its shared one. Experts that tokens choose are not among them, nor matrices of parts that a layer lacks.
        """
        heads, size = self.heads_of(layer)
        queries, kv = self.num_heads * size, heads * size if self.source_of(layer) == layer else 0
        hidden, inner = self.hidden_size, self.inner_of(layer)
        if self.experts and self.experts.layers[layer]:
            inner = self.experts.shared_inner
        mlp = ((inner * (2 if self.gated else 1), hidden), (hidden, inner)) if self.feeds[layer] and inner else ()
        if self.latent:
            return (*self.latent.matrices(hidden), *mlp)
        if self.attention[layer]:
            return (queries * (2 if self.family.gated_attention else 1) + 2 * kv, hidden), (hidden, queries), *mlp
        if self.recurrence and self.recurrence.layers[layer]:
            return (self.recurrence.projected, hidden), (hidden, self.recurrence.width), *mlp
        return mlp

    @property
    def expert_mlps(self) -> int:
        """The number of experts of all layers that tokens choose."""
        return sum(self.experts.layers) * self.experts.count if self.experts else 0

    @property
    def expert_matrices(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of the matrices of an expert that tokens choose."""
        inner, hidden = (self.experts.inner if self.experts else 0), self.hidden_size
        return (*((inner, hidden),) * (2 if self.gated else 1), (hidden, inner)) if self.experts else ()

    @property
    def longest_context(self) -> int:
        """Dynamic scaling stretches the positions of longer contexts as far as needed, by default not at all."""
        scaling = self.rope.scaling
        return int(self.max_position_embeddings * scaling.factor) if isinstance(scaling, Dynamic) else self.max_position_embeddings

    @property
    def depends_on_length(self) -> bool:
        """Whether a rotary embedding depends on the longest sequence."""
        return self.rope.depends_on_length or self.local_rope.depends_on_length

    @property
    def num_weights(self) -> int:
        """The number of parameters, without biases."""
        tables = 1 if self.tie_word_embeddings else 2
        matrices = sum(outs * ins for outs, ins in self.matrices)
        if self.variants:
            matrices += self.num_layers * self.variants.input_size * (self.vocab_size + 3 * self.hidden_size)
        if self.latent:
            matrices += self.num_layers * self.latent.expanding
        if self.experts:
            matrices += self.expert_weights + sum(self.experts.layers) * self.experts.count * self.hidden_size
        positions = self.max_position_embeddings + self.family.unused_positions if self.family.positions else 0
        return matrices + 2 * self.num_layers * self.hidden_size + self.hidden_size * (tables * self.vocab_size + positions + 1)

    @property
    def widest(self) -> int:
        """The numbers of a token's widest activation in a layer."""
        inputs = self.num_layers * self.variants.input_size if self.variants else 0
        inner = max(map(self.inner_of, range(self.num_layers)))
        projected = self.recurrence.projected if self.recurrence else 0
        if self.latent:
            projected = self.latent.projected + self.num_heads * self.latent.value
        return inputs + max(inner, projected, self.experts.widest(self.hidden_size) if self.experts else 0)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of the matrices of all layers (see `matrices_of`)."""
        return tuple(sizes for layer in range(self.num_layers) for sizes in self.matrices_of(layer))

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Reads config.json of a checkpoint's directory.

        Raises ModelNotFound if there is no readable config.json, UnsupportedModel for invalid values, and NoNativeModel for a model without
        native code.
        """
        raw = read_json(directory)
        if not raw.get("quantization_config") and (beside := described_beside(directory)):
            raw["quantization_config"] = beside[1]
        classifier = Classifier.find(raw, directory)
        if classifier is None:
            return cls.parse(raw)
        return replace(cls.parse(raw | {"architectures": [QWEN3.name]}), classifier=classifier, score="sigmoid")

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> ModelConfig:
        """Parses the content of a config.json.

        Raises UnsupportedModel for invalid values, NoNativeModel for a model without native code.
        """
        if raw.get("model_type") == "internlm3":  # Llama, in transformers too, with other names of biases
            raw = {{"qkv_bias": "attention_bias", "bias": "mlp_bias"}.get(name, name): value for name, value in raw.items()}
        entries, family = find_family(raw)
        text = Entries({family.entries.get(name, name): value for name, value in entries.items() if name not in family.ignored})
        config = cls._parse(text, family)
        if config.scheme and config.scheme.method == "mlx" and (config.experts or config.recurrence):
            kind = "experts" if config.experts else "recurrent layers"
            raise UnsupportedModel(
                f"MLX's conversions of models with {kind} cannot be read: take a GGUF file, or the model of another format"
            )
        unread = check_entries(text.unread() | unknown_rope(text, family), experts=config.experts is not None)
        return replace(config, unread=unread + check_beside(raw, entries) + (config.scheme.unread if config.scheme else ()))

    @classmethod
    def _parse(cls, raw: dict[str, Any], family: Architecture) -> ModelConfig:
        if family.single:
            raw = list_layers(raw)
        scheme = check_supported(raw, family)
        hidden, layers = parse_size(raw, "hidden_size"), parse_layers(raw)
        heads = parse_heads(raw, family, hidden, layers)
        recurrence = parse_recurrence(raw, family, layers)
        kinds = (parse_names(raw, "layers_block_type") or []) if family.single else []
        attention, feeds = _parts(kinds, recurrence, layers)
        every = family.biases is not None and bool(raw.get(*family.biases))
        bias = every or (bool(raw.get("attention_bias", False)) and family.output_bias)
        raw = raw | {"max_position_embeddings": parse_size(raw, "max_position_embeddings", family.max_positions)}
        rope, local_rope = parse_ropes(raw, family, heads.rotated)
        return cls(
            architecture=family.name,
            family=family,
            vocab_size=parse_size(raw, "vocab_size", family.vocab_size),
            hidden_size=hidden,
            intermediate_size=_inner(raw, family, hidden),
            num_layers=layers,
            num_heads=heads.queries,
            num_kv_heads=heads.kv[0],
            head_dim=heads.kv[1],
            rms_norm_eps=parse_number(raw, family.norm_eps, family.rms_norm_eps),
            rope=rope,
            local_rope=local_rope,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", raw.get("tie_embedding", family.tied))),
            qkv_bias=bool(raw.get(*family.qkv_bias)) if family.qkv_bias else bias,
            output_bias=bias,
            mlp_bias=every or (family.mlp_bias is not None and bool(raw.get("mlp_bias", family.mlp_bias))),
            qk_norm=bool(family.qk_norm)
            and bool(raw.get(*(family.qk_norm if isinstance(family.qk_norm, tuple) else ("use_qk_norm", True)))),
            parallel=family.parallel if isinstance(family.parallel, bool) else bool(raw.get(*family.parallel)),
            activation=parse_activation(raw, family),
            windows=heads.windows,
            temperature=parse_temperature(raw) if family.temperature else None,
            uses_rope=parse_rope_layers(raw, family, layers),
            attention=attention,
            feeds=feeds,
            recurrence=recurrence,
            latent=heads.latent,
            experts=parse_experts(raw, family.mixture, layers) if family.mixture and (not family.single or EXPERTS in kinds) else None,
            variants=heads.variants,
            only_in_rust=family.code is Code.RUST or (scheme is not None and scheme.kind != ""),
            later_layers=parse_count(raw, "num_nextn_predict_layers"),
            headless=not HEADLESS.keys().isdisjoint(parse_names(raw, "architectures") or []),
            scheme=scheme,
            quantization=scheme.name if scheme else None,
            max_position_embeddings=longest_context(raw["max_position_embeddings"], rope),
            dtype=parse_dtype(raw),
            scales=parse_scales(raw, family, hidden, heads.scale),
        )


def load_shape(directory: Path, *, in_torch: bool = False) -> ModelShape:
    """Reads the config.json of any checkpoint: as a ModelConfig if native code supports it, else with transformers.

    With `in_torch` native code must be in torch: architectures that only the CPU kernels support are left to transformers. Raises
    ModelNotFound if there is no readable config.json, UnsupportedModel if chairlift cannot run the model.
    """
    try:
        model = ModelConfig.load(directory)
        if in_torch and (model.classifier or model.headless):
            raise UnsupportedModel("decoders that score or embed texts run in one process on a CPU alone: use --device cpu")
        if in_torch and model.only_in_rust:
            raise NoNativeModel(f"{model.architecture} has code of ours for one process on a CPU alone")
        return model
    except NoNativeModel as reason:
        try:
            # Imported here because transformers takes seconds to import and need not be installed.
            from chairlift.models.transformers_config import TransformersConfig
        except ModuleNotFoundError as error:
            raise UnsupportedModel(f"{reason}, and transformers' code needs {error.name}: {pip_install_with_torch()}") from None

        return TransformersConfig.load(directory, str(reason))


def _parts(kinds: list[str], recurrence: RecurrentLayers | None, layers: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Returns for each layer whether it has attention, and whether it has an MLP or experts. `kinds` are those of layers with one part."""
    feeds = tuple(kind in FEEDS for kind in kinds) or (True,) * layers
    attention = tuple(kind in ATTENTION for kind in kinds)
    if not kinds:
        attention = tuple(not entry for entry in recurrence.layers) if recurrence else (True,) * layers
    if not any(attention):
        raise UnsupportedModel(f"config.json: none of {layers} layers has attention, and one with it is needed")
    return attention, feeds


def _inner(raw: dict[str, Any], family: Architecture, hidden: int) -> int:
    """Returns the inner size of an MLP. LFM2's config.json has one of which a part is rounded up. A model may have experts alone."""
    if family.model_type != "lfm2":
        only_experts = family.mixture is not None and family.recurrence is not None and family.inner not in raw
        default = 4 * hidden if "n_inner" in family.entries else None
        return parse_size(raw, family.mixture.inner if family.mixture and only_experts else family.inner, default)
    inner = parse_size(raw, "block_ff_dim" if raw.get("block_ff_dim") is not None else family.inner)
    if not raw.get("block_auto_adjust_ff_dim", True):
        return inner
    multiple = parse_size(raw, "block_multiple_of", 256)
    part = parse_number(raw, "block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3)
    if not 1 <= part < 2**31:
        raise UnsupportedModel(f"config.json: block_ff_dim and block_ffn_dim_multiplier make {part:g} of the inner size")
    return -(-int(part) // multiple) * multiple
