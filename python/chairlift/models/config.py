"""Parses and checks a checkpoint's config.json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.architectures import ALIASES, ARCHITECTURES, HEADLESS, QWEN3, WRAPPED, Architecture, Code, Norms, Projections, Windows
from chairlift.errors import UnsupportedModel, pip_install_with_torch
from chairlift.models.classifier import Classifier
from chairlift.models.entries import check_beside, check_entries
from chairlift.models.experts import EXPERTS, Experts, parse_experts
from chairlift.models.fields import (
    Entries,
    NoNativeModel,
    is_positive,
    parse_count,
    parse_dtype,
    parse_layers,
    parse_names,
    parse_number,
    parse_size,
    read_json,
)
from chairlift.models.latent import Latent, parse_latent
from chairlift.models.layer_variants import LayerVariants, parse_variants
from chairlift.models.quantization import QuantizationScheme, UnsupportedScheme, described_beside, parse_quantization
from chairlift.models.recurrence import ATTENTION, FEEDS, RecurrentLayers, list_layers, parse_recurrence
from chairlift.models.rope_config import longest_context, parse_ropes, parse_temperature, unknown_rope
from chairlift.models.rotary import Dynamic, RopeConfig
from chairlift.models.shape import KvSpec, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """The configuration of a model of the Llama family.

    `windows` has one entry per layer: the number of tokens that a token sees, itself included; None means all. Layers with a window use
    `local_rope`. `activation` is silu or gelu_tanh, or relu2 for MLPs without a gate. Attention scores are products times
    `attention_scale`. With a temperature (b, n) the query at position p is multiplied by 1 + b * ln(1 + floor(p / n)). A softcap c maps
    scores or logits to c * tanh(x / c). Embeddings are multiplied by `embedding_scale`, `norm_offset` is added to the weights of all norms,
    and `post_norms` adds a norm after attention and after the MLP. Heads are rotated in the layers selected by `uses_rope`. With
    `whole_norms` the norms of queries and keys are those of all heads together. With `variants` layers have different heads (see
    `LayerVariants`). With `gated_attention` outputs are multiplied by the sigmoids of gates. `attention` says which layers have attention,
    and `feeds` which have an MLP of `intermediate_size` or experts. With a `recurrence` some layers have a state instead of keys and
    values, and with `experts` some have a mixture of experts. With a `latent` keys and values are made of one vector a token. The output of
    attention and of the MLP is multiplied by `residual_scale` before it is added to the residual stream, and logits are multiplied by
    `logits_scale`. `scheme` is that of quantised layers. A checkpoint has `later_layers` after the last one, which predict tokens beyond
    the next one and are not used. With a `classifier` the model scores pairs of texts and generates none. A `headless` model computes
    embeddings alone. `embedding` is the name of the embeddings' matrix.
    """

    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    whole_norms: bool
    sinks: bool
    windows: tuple[int | None, ...]
    local_rope: RopeConfig
    attention_scale: float
    temperature: tuple[float, int] | None
    attention_softcap: float | None
    final_softcap: float | None
    activation: str
    embedding_scale: float
    norm_offset: float
    post_norms: bool
    uses_rope: tuple[bool, ...]
    residual_scale: float
    logits_scale: float
    projections: Projections
    norms: Norms
    gated_attention: bool
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
    def gated(self) -> bool:
        """Whether MLPs and experts have a gate."""
        return self.activation != "relu2"

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

        The first two of a recurrent layer are its projections, and the first ones of attention to latents are its own. Experts are not
        among them, nor matrices of parts that a layer lacks.
        """
        heads, size = self.heads_of(layer)
        queries, kv = self.num_heads * size, heads * size if self.source_of(layer) == layer else 0
        hidden, inner = self.hidden_size, self.inner_of(layer)
        mlp = ((inner * (2 if self.gated else 1), hidden), (hidden, inner)) if self.feeds[layer] else ()
        if self.latent:
            return (*self.latent.matrices(hidden), *mlp)
        if self.attention[layer]:
            return (queries * (2 if self.gated_attention else 1) + 2 * kv, hidden), (hidden, queries), *mlp
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
        if self.experts:
            mlp = (3 if self.gated else 2) * self.intermediate_size * self.hidden_size
            matrices += sum(self.experts.layers) * (self.experts.weights(self.hidden_size) - mlp)
        return matrices + 2 * self.num_layers * self.hidden_size + self.hidden_size * (tables * self.vocab_size + 1)

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
        entries, family = _architecture(raw)
        config = cls._parse(text := Entries(entries), family)
        unread = check_entries(text.unread() | unknown_rope(text), experts=config.experts is not None)
        return replace(config, unread=unread + check_beside(raw, entries) + (config.scheme.unread if config.scheme else ()))

    @classmethod
    def _parse(cls, raw: dict[str, Any], family: Architecture) -> ModelConfig:
        if family.single:
            raw = list_layers(raw)
        scheme = _check_supported(raw, family)
        heads = parse_size(raw, "num_attention_heads", family.heads)
        hidden = parse_size(raw, "hidden_size")
        layers = parse_layers(raw)
        latent = parse_latent(raw, heads) if family.latent else None
        kv_heads = 1 if latent else parse_size(raw, "num_key_value_heads", family.kv_heads or heads)
        head_dim = latent.cached if latent else parse_size(raw, "head_dim", family.head_dim or hidden // heads)
        windows, local, variants = _windows(raw, family, layers), (kv_heads, head_dim), None
        if family.global_head_dim is not None:
            variants, (kv_heads, head_dim) = parse_variants(raw, windows, local, family.global_head_dim)
        _check_heads(heads, {local, (kv_heads, head_dim)})
        recurrence = parse_recurrence(raw, family, layers)
        kinds = (parse_names(raw, "layers_block_type") or []) if family.single else []
        attention, feeds = _parts(kinds, recurrence, layers)
        bias = bool(raw.get("attention_bias", False)) and family.output_bias
        raw = raw | {"max_position_embeddings": parse_size(raw, "max_position_embeddings", family.max_positions)}
        rotated = (latent.rotated,) * 2 if latent else (head_dim, local[1])
        rope, local_rope = parse_ropes(raw, family, rotated)
        scales = _multipliers(raw) if family.multipliers else _Scales.of(raw, family, hidden, head_dim)
        softcaps = _softcaps(raw, family)
        return cls(
            architecture=family.name,
            vocab_size=parse_size(raw, "vocab_size", family.vocab_size),
            hidden_size=hidden,
            intermediate_size=_inner(raw, family),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=parse_number(raw, family.norm_eps, family.rms_norm_eps),
            rope=rope,
            local_rope=local_rope,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", raw.get("tie_embedding", family.tied))),
            qkv_bias=bool(raw.get(*family.qkv_bias)) if family.qkv_bias else bias,
            output_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family.mlp_bias,
            qk_norm=family.qk_norm and bool(raw.get("use_qk_norm", True)),
            whole_norms=family.whole_norms,
            sinks=family.sinks,
            windows=windows,
            temperature=parse_temperature(raw) if family.temperature else None,
            attention_softcap=softcaps[0],
            final_softcap=softcaps[1],
            activation=family.activation,
            norm_offset=family.norm_offset,
            post_norms=family.post_norms,
            uses_rope=_uses_rope(raw, family, layers),
            projections=family.projections,
            norms=family.norms,
            gated_attention=family.gated_attention,
            attention=attention,
            feeds=feeds,
            recurrence=recurrence,
            latent=latent,
            experts=parse_experts(raw, family.mixture, layers) if family.mixture and (not family.single or EXPERTS in kinds) else None,
            variants=variants,
            only_in_rust=family.code is Code.RUST or (scheme is not None and scheme.kind != ""),
            later_layers=parse_count(raw, "num_nextn_predict_layers"),
            headless=not HEADLESS.keys().isdisjoint(parse_names(raw, "architectures") or []),
            scheme=scheme,
            quantization=scheme.name if scheme else None,
            max_position_embeddings=longest_context(raw["max_position_embeddings"], rope),
            dtype=parse_dtype(raw),
            embedding_scale=scales.embedding,
            attention_scale=latent.scale if latent else scales.attention,
            residual_scale=scales.residual,
            logits_scale=scales.logits,
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


_RENAMED = ("exaone", "sarvam_moe")
"""Values of `model_type` of files with the name of an architecture here, in which transformers has renamed the tensors."""


def _architecture(raw: dict[str, Any]) -> tuple[dict[str, Any], Architecture]:
    """Returns the configuration of the model of text, and its architecture."""
    if raw.get("model_type") in _RENAMED:
        raise NoNativeModel(f"the names that {raw['model_type']} gives tensors have no code of ours")
    names, text = parse_names(raw, "architectures") or [], raw.get("text_config")
    names = [name for name in names if name != "PeftModelForCausalLM"]  # a merged adapter, whose model_type is that of the base
    for name in names or [known.name for known in ARCHITECTURES.values() if known.model_type == raw.get("model_type")]:
        own = text if isinstance(text, dict) else raw  # the first configurations of Qwen2-VL have no text_config
        if known := WRAPPED.get((name, str(own.get("model_type")))):
            shared = ("tie_word_embeddings", "quantization_config", "quantization", "dtype", "torch_dtype")
            return {**known.defaults, **own, **{key: raw[key] for key in shared if key in raw}}, known
        if known := ARCHITECTURES.get(name) or ALIASES.get(name):
            return raw, known
        if name in HEADLESS and text is None:
            return raw | {"tie_word_embeddings": True}, HEADLESS[name]
    named = ", ".join(names) or f"model_type {raw.get('model_type')!r}, and no architectures,"
    raise NoNativeModel(f"{named} has no code of ours (docs/models.md lists what has)")


def _check_supported(raw: dict[str, Any], family: Architecture) -> QuantizationScheme | None:
    """Returns how layers are quantised. Raises NoNativeModel for features that the architecture allows but the native code lacks."""
    if family.gated_attention and raw.get("attention_bias"):
        raise NoNativeModel("biases of gated attention have no code of ours")
    for name, known in family.activations.items():
        if (activation := raw.get(name) or known[0]) not in known:
            raise NoNativeModel(f"{name} {activation!r} has no code of ours (there is for {known[0]})")
    # "vision" is about tokens of images alone.
    if raw.get("use_bidirectional_attention") not in (None, False, "vision") or raw.get("is_causal") is False:
        raise NoNativeModel("attention to later tokens has no code of ours")
    if raw.get("clip_qkv") is not None:
        raise NoNativeModel("clipped queries, keys and values have no code of ours")
    # Qwen's mixtures can have windows. Which layers have one follows another rule than in Qwen2.
    if family.mixture and family.windows is Windows.NONE and raw.get("use_sliding_window") and raw.get("sliding_window", 1):
        raise NoNativeModel(f"sliding windows in {family.name} have no code of ours")
    quantization = raw.get("quantization_config") or raw.get("quantization")  # the second is MLX's name
    if family.sinks and isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        return None  # the experts of gpt-oss alone, whose tensors have names of their own
    try:
        return parse_quantization(quantization)
    except UnsupportedScheme as reason:
        raise NoNativeModel(str(reason)) from None


def _check_heads(queries: int, heads: set[tuple[int, int]]) -> None:
    """Raises UnsupportedModel for numbers and sizes of KV heads that cannot be computed with so many heads of queries."""
    for count, size in heads:
        if queries % count:
            raise UnsupportedModel(f"num_attention_heads ({queries}) must be a multiple of num_key_value_heads ({count})")
        if size % 2:
            raise UnsupportedModel(f"head_dim must be even for rotary positions, got {size}")


def _parts(kinds: list[str], recurrence: RecurrentLayers | None, layers: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Returns for each layer whether it has attention, and whether it has an MLP or experts. `kinds` are those of layers with one part."""
    feeds = tuple(kind in FEEDS for kind in kinds) or (True,) * layers
    attention = tuple(kind in ATTENTION for kind in kinds)
    if not kinds:
        attention = tuple(not entry for entry in recurrence.layers) if recurrence else (True,) * layers
    if not any(attention):
        raise UnsupportedModel(f"config.json: none of {layers} layers has attention, and one with it is needed")
    return attention, feeds


def _inner(raw: dict[str, Any], family: Architecture) -> int:
    """Returns the inner size of an MLP. LFM2's config.json has one of which a part is rounded up. A model may have experts alone."""
    if family.model_type != "lfm2":
        only_experts = family.mixture is not None and family.recurrence is not None and family.inner not in raw
        return parse_size(raw, family.mixture.inner if family.mixture and only_experts else family.inner)
    inner = parse_size(raw, "block_ff_dim" if raw.get("block_ff_dim") is not None else family.inner)
    if not raw.get("block_auto_adjust_ff_dim", True):
        return inner
    multiple = parse_size(raw, "block_multiple_of", 256)
    part = parse_number(raw, "block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3)
    if not 1 <= part < 2**31:
        raise UnsupportedModel(f"config.json: block_ff_dim and block_ffn_dim_multiplier make {part:g} of the inner size")
    return -(-int(part) // multiple) * multiple


def _softcaps(raw: dict[str, Any], family: Architecture) -> tuple[float | None, float | None]:
    """Returns the caps of attention scores and of logits. Later models than Gemma 2 may name one of scores, and have none."""
    if family.softcaps is None:
        return None, None
    scores, logits = family.softcaps
    cap = _number(raw, "attn_logit_softcapping", scores)
    return cap if scores else None, _number(raw, "final_logit_softcapping", logits)


def _number(raw: dict[str, Any], name: str, default: float | None) -> float | None:
    """Returns a positive number of the config, or None for null. Absence means the default."""
    value = raw.get(name, default)
    if value is None:
        return None
    if not is_positive(value):
        raise UnsupportedModel(f"config.json: {name} must be a positive number or null, got {value!r:.100}")
    return float(value)


class _Scales(NamedTuple):
    """The factors of embeddings, of attention scores, of the outputs of blocks and of logits."""

    embedding: float
    attention: float
    residual: float = 1.0
    logits: float = 1.0

    @classmethod
    def of(cls, raw: dict[str, Any], family: Architecture, hidden: int, head_dim: int) -> _Scales:
        """Returns those of a model without multipliers."""
        scalar = _number(raw, "query_pre_attn_scalar", family.query_scalar) if family.query_scalar else None
        return cls(hidden**0.5 if family.scaled_embeddings else 1.0, (scalar or head_dim) ** -0.5)


def _multipliers(raw: dict[str, Any]) -> _Scales:
    """Returns Granite's, which are 1 where config.json is silent."""
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    embedding, attention, residual, logits = (_number(raw, name, 1.0) or 1.0 for name in names)
    return _Scales(embedding, attention, residual, 1.0 / logits)


def _uses_rope(raw: dict[str, Any], family: Architecture, layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether it uses rotary positions."""
    if family.position_type is not None:
        return (raw.get("position_embedding_type", family.position_type) == "rope",) * layers
    interval = family.no_rope_interval
    if interval is None:
        return (True,) * layers
    interval = parse_size(raw, "no_rope_layer_interval", interval)
    listed = raw.get("no_rope_layers")
    if listed is None:
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(listed, list) or len(listed) < layers or set(listed) - {0, 1}:
        raise UnsupportedModel(f"config.json: no_rope_layers must have 0 or 1 for each of {layers} layers, got {listed!r:.200}")
    return tuple(bool(entry) for entry in listed[:layers])


def _windows(raw: dict[str, Any], family: Architecture, layers: int) -> tuple[int | None, ...]:
    """Returns each layer's sliding window."""
    window, rule, types = raw.get("sliding_window", family.sliding_window), family.windows, parse_names(raw, "layer_types")
    if rule is Windows.NONE or window is None or (rule is Windows.SWITCHED and not raw.get("use_sliding_window", False)):
        return (None,) * layers
    window = parse_size({"sliding_window": window}, "sliding_window")
    if rule is Windows.ALL or (rule is Windows.ALL_UNLESS_LISTED and types is None):
        return (window,) * layers
    if types is None and family.window_interval is not None:
        interval = parse_size(raw, "sliding_window_pattern", family.window_interval)
        return tuple(window if (layer + 1) % interval else None for layer in range(layers))
    if types is None and family.no_rope_interval is not None:
        return tuple(None if uses else window for uses in _uses_rope(raw, family, layers))
    if types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(layers))
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != layers:
        raise UnsupportedModel(f"layer_types must name full_attention or sliding_attention for each of {layers} layers, got {types!r:.200}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
