"""Parses the configuration of encoders, which compute embeddings of texts or the scores of pairs of texts."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chairlift.architectures import ENCODERS, EncoderArchitecture
from chairlift.errors import UnsupportedModel
from chairlift.models.embedding_decoder import decoder_name, is_causal, parse_decoder, windows_of
from chairlift.models.entries import check_entries
from chairlift.models.fields import (
    Entries,
    parse_count,
    parse_dtype,
    parse_layers,
    parse_names,
    parse_number,
    parse_size,
    parse_table,
    read_json,
)
from chairlift.models.rotary import Linear, RopeConfig
from chairlift.models.shape import KvSpec, ModelShape

log = logging.getLogger("chairlift")

POOLINGS = {"cls": "first", "mean": "mean", "lasttoken": "last"}
"""The names of sentence-transformers, and those of the CPU kernels."""
RANK = "rank"
"""llama.cpp's name for a classifier on the first token's state."""
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu"}
_SCORES = {"Identity": "identity", "Sigmoid": "sigmoid"}
SETTINGS = "config_sentence_transformers.json"
_KNOWN = {
    *("__version__", "prompts", "default_prompt_name", "similarity_fn_name", "model_type", "activation_fn"),
    *("max_seq_length", "do_lower_case", "transformer_task", "module_output_name", "model_args", "config_args", "tokenizer_args"),
    *("unpad_inputs", "modality_config", "processing_kwargs", "model_kwargs", "config_kwargs", "processor_kwargs", "backend"),
}
"""Entries of the configurations of sentence-transformers that are read, or that say how transformers loads a model of text."""
_PRETRAINED = re.compile("For(MaskedLM|PreTraining)$")
"""What ends the name of a model with layers for its training, which embeddings are computed without."""
_BY_TYPE = {known.model_type: name for name, known in ENCODERS.items() if name.endswith("Model")}
"""The encoders by `model_type`, for older checkpoints that name no architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModule:
    """A layer of sentence-transformers after the pooling: its directory, its sizes, and its activation (identity, tanh or gelu)."""

    path: str
    ins: int
    outs: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """What the modules of sentence-transformers in a directory say: the pooling, None if there is none, and the layers after it.

    Embeddings are not `normalized` if no module does it and they are made for products that depend on their lengths.
    """

    pooling: str | None = None
    dense: tuple[DenseModule, ...] = ()
    normalized: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(ModelShape):
    """The configuration of an encoder.

    `layout` names its tensors. Positions start at `first_position`; `num_positions` is 0 for rotary ones. Layers with a window use
    `local_rope`. Each layer attends to `windows` tokens on either side, None for all, and to no later ones if the model is `causal`.
    `pooling` is how the states of a text are combined to its embedding: first, last or mean, and `dense` are the layers after it. The
    result is scaled to length 1 if it is `normalized`.
    """

    layout: EncoderArchitecture
    num_kv_heads: int
    head_dim: int
    num_positions: int
    first_position: int
    num_token_types: int
    norm_eps: float
    rope: RopeConfig | None
    local_rope: RopeConfig | None
    attention_scale: float
    windows: tuple[int | None, ...]
    causal: bool = False
    qkv_bias: bool
    pooling: str
    dense: tuple[DenseModule, ...]
    normalized: bool

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """None: an encoder keeps no keys and values."""
        return ()

    @property
    def num_weights(self) -> int:
        """The number of parameters, without biases and norms."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = attention + (2 + (self.layout.gate is not None)) * self.intermediate_size
        tables = self.vocab_size + self.num_positions + self.num_token_types
        return self.hidden_size * (self.num_layers * layer + tables) + sum(layer.ins * layer.outs for layer in self.dense)

    @property
    def embedding_size(self) -> int:
        """The numbers of a text's result."""
        if self.score is not None:
            return 1
        return self.dense[-1].outs if self.dense else self.hidden_size

    @classmethod
    def find(cls, directory: Path) -> EncoderConfig | None:
        """Reads the configuration of a checkpoint's directory; None if it is no encoder.

        Raises ModelNotFound if there is no readable config.json, and UnsupportedModel for an encoder that is not supported.
        """
        raw = read_json(directory)
        for name in parse_names(raw, "architectures") or [_BY_TYPE.get(str(raw.get("model_type")), "")]:
            name = _PRETRAINED.sub("Model", name)
            # A decoder of this name attends to earlier tokens alone.
            if name in ENCODERS and (name != "Gemma3TextModel" or raw.get("use_bidirectional_attention")):
                encoder = cls._parse(entries := Entries(raw), ENCODERS[name], directory)
                return replace(encoder, unread=check_entries(entries.unread(), experts=False) + _unused(directory))
        names = decoder_name(raw)
        return None if names is None else cls._of_decoder(raw, directory, names)

    @classmethod
    def _of_decoder(cls, raw: dict[str, Any], directory: Path, names: tuple[str, str]) -> EncoderConfig | None:
        """Reads a decoder whose embeddings need whole texts; None for one that generates, or whose last state is the embedding."""
        causal = is_causal(raw, names[0])
        try:
            modules = find_modules(directory)
            if causal and modules.pooling in (None, "lasttoken", RANK) and not modules.dense:
                return None
            if modules.pooling == RANK:
                raise UnsupportedModel(f"{names[0]} with attention to later tokens and a classifier is not supported")
            model, layout = parse_decoder(raw, directory, names)
            windows = windows_of(model, causal=causal)
        except UnsupportedModel:
            if causal and names[0] == names[1]:
                return None  # it generates text
            raise
        return cls(
            architecture=names[0],
            layout=layout,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            max_position_embeddings=model.max_position_embeddings,
            dtype=model.dtype,
            num_positions=0,
            first_position=0,
            num_token_types=0,
            norm_eps=model.rms_norm_eps,
            rope=model.rope,
            local_rope=model.local_rope,
            attention_scale=model.scales.attention,
            windows=windows,
            causal=causal,
            qkv_bias=model.qkv_bias,
            unread=model.unread + _unused(directory),
            pooling=POOLINGS.get(modules.pooling or "", "mean"),
            dense=modules.dense,
            normalized=modules.normalized,
        )

    @classmethod
    def _parse(cls, raw: dict[str, Any], layout: EncoderArchitecture, directory: Path) -> EncoderConfig:
        raw = raw | {name: raw[other] for name, other in layout.keys.items() if other in raw}
        for name, value in layout.expected.items():
            if raw.get(name, value) != value:
                raise UnsupportedModel(f"{layout.name} with {name} {raw[name]!r} is not supported (supported: {value!r})")
        hidden, heads = parse_size(raw, "hidden_size"), parse_size(raw, "num_attention_heads")
        layers, kv_heads = parse_layers(raw), parse_size(raw, "num_key_value_heads", heads)
        head_dim = parse_size(raw, "head_dim", hidden // heads)
        if hidden % heads and "head_dim" not in raw:
            raise UnsupportedModel(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
        if heads % kv_heads:
            raise UnsupportedModel(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
        positions = parse_size(raw, "max_position_embeddings")
        first = parse_count(raw, "pad_token_id") + 1 if layout.offset_positions else 0
        if first >= positions:
            raise UnsupportedModel(f"config.json: positions begin after pad_token_id ({first - 1}), and there are {positions}")
        scalar = parse_number(raw, "query_pre_attn_scalar", head_dim)
        modules = find_modules(directory)
        rope, local_rope = _ropes(raw, layout, head_dim)
        score = _scores(raw, layout, modules, _settings(directory).get("activation_fn"))
        # A classifier's head has the first state, unless ModernBERT's configuration says otherwise.
        usual = "first" if score and raw.get("classifier_pooling") != "mean" else "mean"
        return cls(
            architecture=layout.name,
            layout=layout,
            vocab_size=parse_size(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=parse_size(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positions - first,
            dtype=parse_dtype(raw),
            num_positions=positions if layout.positions else 0,
            first_position=first,
            num_token_types=parse_count(raw, "type_vocab_size", 2) if layout.types else 0,
            norm_eps=parse_number(raw, "rms_norm_eps" if layout.rms else "layer_norm_eps", layout.norm_eps),
            rope=rope,
            local_rope=local_rope,
            attention_scale=(scalar if layout.rms else head_dim) ** -0.5,
            windows=_windows(raw, layout, layers),
            qkv_bias=layout.biases,
            pooling=POOLINGS.get(modules.pooling or "", usual),
            dense=modules.dense,
            normalized=modules.normalized,
            score=score,
        )


def find_modules(directory: Path) -> Modules:
    """What the modules of sentence-transformers in a directory say. Raises UnsupportedModel for modules that there is no code for."""
    pooling, dense, normalized = None, list[DenseModule](), False
    modules = read_json(directory, "modules.json") if (directory / "modules.json").exists() else []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UnsupportedModel(f"modules.json must be a list of objects, got {modules!r:.200}")
    for module in modules:
        kind, path = str(module.get("type")).rpartition(".")[2], str(module.get("path"))
        if path.startswith("/") or ".." in path.split("/"):
            raise UnsupportedModel(f"modules.json names {path!r:.100}, which is outside of the model's directory")
        if kind == "Pooling":
            pooling = _pooling(read_json(directory / path))
        elif kind == "Dense":
            dense.append(_dense(read_json(directory / path), path))
        elif kind == "Normalize":
            normalized = True
        elif kind not in ("Transformer", "Dropout"):  # which only matters in training
            raise UnsupportedModel(f"modules.json has a module {kind}: there is code for Transformer, Pooling, Dense and Normalize")
    return Modules(pooling=pooling, dense=tuple(dense), normalized=normalized or not _compares_by_dot(directory))


def _compares_by_dot(directory: Path) -> bool:
    """Whether embeddings are compared by their dot product, which depends on their lengths."""
    return _settings(directory).get("similarity_fn_name") in ("dot", "dot_product")


def report_prompt(directory: Path) -> None:
    """Logs that texts do not get the prompt that sentence-transformers puts before each of them, if there is one."""
    settings = _settings(directory)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    if prompt := prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None:
        log.warning("%s: sentence-transformers puts %r before each text, and here clients must send it", directory, str(prompt)[:200])


def _settings(directory: Path, name: str = SETTINGS) -> dict[str, Any]:
    """Returns the configuration of sentence-transformers; empty without one."""
    found = read_json(directory, name) if (directory / name).exists() else None
    return found if isinstance(found, dict) else {}


def _unused(directory: Path) -> tuple[str, ...]:
    """Returns the entries of the configurations of sentence-transformers that are not used: no text is known to be a prompt here."""
    names = [SETTINGS, *sorted(path.name for path in directory.glob("sentence_*_config.json"))]
    found = [(entry, name) for name in names for entry, value in _settings(directory, name).items() if value and entry not in _KNOWN]
    poolings = [str(path.relative_to(directory)) for path in sorted(directory.glob("*_Pooling/config.json"))]
    found += [(entry, name) for name in poolings if _settings(directory, name).get(entry := "include_prompt") is False]
    return tuple(f"{entry} of {name}" for entry, name in found)


def decoder_pooling(directory: Path) -> str | None:
    """The pooling of a decoder: last, unless its modules name another one or more layers, which there is no code for (None)."""
    try:
        modules = find_modules(directory)
    except UnsupportedModel:
        return None
    report_prompt(directory)
    return "last" if modules.pooling in (None, "lasttoken") and not modules.dense else None


def longest_text(directory: Path, model: ModelShape) -> int:
    """The most tokens of a text: those that sentence-transformers' configuration names, or else those that the model was made for."""
    name = next((path.name for path in sorted(directory.glob("sentence_*_config.json"))), None)  # named after the kind of transformer
    found = read_json(directory, name) if name else None
    given = found.get("max_seq_length") if isinstance(found, dict) else None
    return min(given, model.max_position_embeddings) if isinstance(given, int) and given > 0 else model.max_position_embeddings


def _pooling(raw: dict[str, Any]) -> str:
    _check_module(raw, "pooling", re.compile(r"pooling_mode\w*|(word_)?embedding_dimension|include_prompt"))
    chosen = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]
    names = [name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for name in chosen]
    if mode := raw.get("pooling_mode"):
        names = [str(name) for name in mode] if isinstance(mode, list) else [str(mode)]
    if len(names) != 1 or names[0] not in (*POOLINGS, RANK):
        raise UnsupportedModel(f"pooling by {' and '.join(names) or 'nothing'} is not supported (supported: {', '.join(POOLINGS)})")
    return names[0]


def _check_module(raw: dict[str, Any], what: str, known: re.Pattern[str]) -> None:
    """Raises UnsupportedModel for a setting of a module that may change its result and that nothing here knows."""
    if unknown := next((name for name, value in raw.items() if value and not known.fullmatch(name)), None):
        raise UnsupportedModel(f"{what} with {unknown} {raw[unknown]!r:.100} has no code of ours")


def _dense(raw: dict[str, Any], path: str) -> DenseModule:
    usual = {name: value for name, value in raw.items() if value != "sentence_embedding"}  # the names of inputs and outputs
    _check_module(usual, path, re.compile("in_features|out_features|bias|activation_function"))
    activation = str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"{path}: activation {activation} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    sizes = parse_size(raw, "in_features"), parse_size(raw, "out_features")
    return DenseModule(path=path, ins=sizes[0], outs=sizes[1], bias=bool(raw.get("bias", True)), activation=_ACTIVATIONS[activation])


def _scores(raw: dict[str, Any], layout: EncoderArchitecture, modules: Modules, named: Any) -> str | None:
    """What becomes of a classifier's number, by the activation `named`; None for a model of embeddings.

    Raises UnsupportedModel for more than one label.
    """
    if not layout.name.endswith("ForSequenceClassification") and modules.pooling != RANK:
        return None
    labels = len(parse_table(raw, "id2label")) or raw.get("num_labels", 2)
    if labels != 1:
        raise UnsupportedModel(f"{layout.name} has {labels} labels: there is code for classifiers with one, which score pairs of texts")
    named = named or parse_table(raw, "sentence_transformers").get("activation_fn") or raw.get("sbert_ce_default_activation_function")
    activation = str(named or "Sigmoid").rpartition(".")[2]
    if activation not in _SCORES:
        raise UnsupportedModel(f"scores by {activation} are not supported (supported: {', '.join(_SCORES)})")
    return _SCORES[activation]


def _ropes(raw: dict[str, Any], layout: EncoderArchitecture, head_dim: int) -> tuple[RopeConfig | None, RopeConfig | None]:
    """The rotary embeddings for all tokens and for windows; None without any. Raises UnsupportedModel for a scaling without code."""
    tables, scaling = parse_table(raw, "rope_parameters"), parse_table(raw, "rope_scaling")
    whole, local = (parse_table(tables, f"{kind}_attention") or tables for kind in ("full", "sliding"))
    kinds = [table.get("rope_type", table.get("type", "default")) for table in (whole, local, scaling)]
    # GTE's own scaling stretches each frequency by another factor, whatever the length of the text.
    stretched = kinds[2] == "ntk" and scaling.get("mixed_b") is None
    if unknown := [kind for kind in kinds[: 2 if stretched else 3] if kind != "default"]:
        raise UnsupportedModel(f"{layout.name} with positions of type {unknown[0]!r} is not supported (supported: default, and ntk of GTE)")
    if layout.theta is None:
        return None, None
    theta = parse_number(whole, "rope_theta", raw.get("rope_theta") or layout.theta)
    if stretched:
        factor = parse_number(scaling, "factor")
        rope = RopeConfig(dim=head_dim, theta=theta * factor, scaling=Linear(factor ** (2 / head_dim)))
        return rope, rope
    local_theta = parse_number(local, "rope_theta", raw.get("rope_local_base_freq") or layout.local_theta or theta)
    return RopeConfig(dim=head_dim, theta=theta), RopeConfig(dim=head_dim, theta=local_theta)


def _windows(raw: dict[str, Any], layout: EncoderArchitecture, layers: int) -> tuple[int | None, ...]:
    """How many tokens on either side each layer attends to. `sliding_window` is the width of a window."""
    if layout.window_interval is None or raw.get("sliding_window") is None:
        return (None,) * layers
    near = parse_size(raw, "sliding_window") // 2
    every = parse_size(raw, "sliding_window_pattern", layout.window_interval)
    kinds = parse_names(raw, "layer_types") or [
        "sliding_attention" if (layer + layout.first_counted) % every else "full_attention" for layer in range(layers)
    ]
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"layer_types must name full_attention or sliding_attention for each of {layers} layers, got {kinds!r:.200}")
    return tuple(near if kind == "sliding_attention" else None for kind in kinds)
