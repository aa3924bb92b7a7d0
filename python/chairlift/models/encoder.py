"""Parses the configuration of encoders of the BERT family, which compute embeddings of texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.models.fields import parse_dtype, parse_size, read_json
from chairlift.models.shape import KvSpec, ModelShape

ENCODERS = {
    "BertModel": "",
    "BertForMaskedLM": "bert.",
    "RobertaModel": "",
    "XLMRobertaModel": "",
}
"""The supported architectures, each with the prefix of its tensors' names."""

POOLINGS = {"cls": "first", "mean": "mean", "lasttoken": "last"}
"""The names of sentence-transformers, and those of the CPU kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(ModelShape):
    """The configuration of an encoder.

    `prefix` begins the names of its tensors. Positions start at `first_position`. `pooling` is how the states of a text are combined to its
    embedding: first, last or mean.
    """

    prefix: str
    num_positions: int
    first_position: int
    num_token_types: int
    norm_eps: float
    pooling: str

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """None: an encoder keeps no keys and values."""
        return ()

    @property
    def num_weights(self) -> int:
        """The number of parameters, without biases and norms."""
        layer = 4 * self.hidden_size + 2 * self.intermediate_size
        tables = self.vocab_size + self.num_positions + self.num_token_types
        return self.hidden_size * (self.num_layers * layer + tables)

    @classmethod
    def find(cls, directory: Path) -> EncoderConfig | None:
        """Reads the configuration of a checkpoint's directory; None if it is no encoder.

        Raises ModelNotFound if there is no readable config.json, and UnsupportedModel for an encoder that is not supported.
        """
        raw = read_json(directory)
        for name in raw.get("architectures") or []:
            if name in ENCODERS:
                return cls._parse(raw, name, directory)
        return None

    @classmethod
    def _parse(cls, raw: dict[str, Any], architecture: str, directory: Path) -> EncoderConfig:
        expected = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
        for name, value in expected.items():
            if raw.get(name, value) != value:
                raise UnsupportedModel(f"{architecture} with {name} {raw[name]!r} is not supported (supported: {value!r})")
        positions = parse_size(raw, "max_position_embeddings")
        # RoBERTa numbers positions from the padding token's id on.
        first = 0 if architecture.startswith("Bert") else int(raw.get("pad_token_id") or 0) + 1
        heads, hidden = parse_size(raw, "num_attention_heads"), parse_size(raw, "hidden_size")
        if hidden % heads:
            raise UnsupportedModel(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")
        return cls(
            architecture=architecture,
            vocab_size=parse_size(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=parse_size(raw, "intermediate_size"),
            num_layers=parse_size(raw, "num_hidden_layers"),
            num_heads=heads,
            max_position_embeddings=positions - first,
            dtype=parse_dtype(raw),
            prefix=ENCODERS[architecture],
            num_positions=positions,
            first_position=first,
            num_token_types=parse_size(raw, "type_vocab_size"),
            norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
            pooling=find_pooling(directory) or "mean",
        )


def find_pooling(directory: Path) -> str | None:
    """The pooling that the modules of sentence-transformers in a directory name: first, last or mean; None if there are none.

    Raises UnsupportedModel for other modules or poolings.
    """
    modules = read_json(directory, "modules.json") if (directory / "modules.json").exists() else []
    found = None
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            found = _pooling(read_json(directory / str(module.get("path"))))
        elif kind not in ("Transformer", "Normalize"):
            raise UnsupportedModel(f"modules.json has a module {kind}: there is code for Transformer, Pooling and Normalize")
    return found


def decoder_pooling(directory: Path) -> str | None:
    """The pooling of a decoder: last, unless its modules name another one, which there is no code for (None)."""
    try:
        return "last" if find_pooling(directory) in (None, "last") else None
    except UnsupportedModel:
        return None


def longest_text(directory: Path, model: ModelShape) -> int:
    """The most tokens of a text: those that sentence-transformers' configuration names, or else those that the model was made for."""
    name = "sentence_bert_config.json"
    given = read_json(directory, name).get("max_seq_length") if (directory / name).exists() else None
    return min(given, model.max_position_embeddings) if isinstance(given, int) and given > 0 else model.max_position_embeddings


def _pooling(raw: dict[str, Any]) -> str:
    chosen = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]
    names = [name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for name in chosen]
    if isinstance(mode := raw.get("pooling_mode"), str):
        names = [mode]
    if len(names) != 1 or names[0] not in POOLINGS:
        raise UnsupportedModel(f"pooling by {' and '.join(names) or 'nothing'} is not supported (supported: {', '.join(POOLINGS)})")
    return POOLINGS[names[0]]
