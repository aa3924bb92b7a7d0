"""Parses the part of a config.json that describes recurrent layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from chairlift.architectures import Architecture, Recurrence, RecurrentKind
from chairlift.architectures.architecture import Entry
from chairlift.errors import UnsupportedModel
from chairlift.models.experts import EXPERTS
from chairlift.models.fields import NoNativeModel, is_positive, parse_names, parse_size

ATTENTION = ("full_attention", "attention")
"""The names of layers with attention among recurrent ones."""
FEEDS = ("mlp", EXPERTS)
"""The names of layers with an MLP or experts alone."""
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": EXPERTS}
"""The letters of `hybrid_override_pattern`."""
LANES = 16
"""What sizes are multiples of, as in `rust/cpu/src/recurrent.rs`."""
MAX_TAPS = 4
"""The longest convolution, as in `rust/cpu/src/recurrent/convolve.rs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayers:
    """The recurrent layers of a model.

    Each of `layers` is whether the layer is recurrent. A convolution sees `taps` tokens. There are `count` heads of `value_size`, whose
    keys and queries of `key_size` are those of `groups`: head h uses h modulo `groups` if they are `tiled`, else consecutive heads share
    one. Without heads these numbers are 0. `names` are those of the tensors.
    """

    names: Recurrence
    layers: tuple[bool, ...]
    hidden: int
    taps: int
    count: int
    groups: int
    key_size: int
    value_size: int
    tiled: bool
    conv_bias: bool
    bias: bool
    steps: tuple[float, float]

    @property
    def width(self) -> int:
        """The numbers of a layer's output before the last projection."""
        return self.count * self.value_size or self.hidden

    @property
    def channels(self) -> int:
        """The channels of a convolution."""
        return self.count * self.value_size + 2 * self.groups * self.key_size or self.hidden

    @property
    def projected(self) -> int:
        """The numbers that a layer projects its input to."""
        scalars = {RecurrentKind.CONVOLUTION: 2 * self.hidden, RecurrentKind.DELTA: 2 * self.count, RecurrentKind.SPACE: self.count}
        return self.channels + (self.width if self.count else 0) + scalars[self.names.kind]

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state."""
        return 4 * sum(self.layers) * ((self.taps - 1) * self.channels + self.count * self.key_size * self.value_size)


def list_layers(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a model whose layers have one part each, with a list of them: `layers_block_type`.

    Raises UnsupportedModel if config.json does not say what the layers are.
    """
    kinds, pattern = parse_names(raw, "layers_block_type"), raw.get("hybrid_override_pattern")
    if not kinds:
        if not isinstance(pattern, str) or not pattern or set(pattern) - LETTERS.keys():
            letters = ", ".join(f"{letter} ({kind})" for letter, kind in LETTERS.items())
            raise UnsupportedModel(f"config.json: hybrid_override_pattern must have for each layer one of {letters}, got {pattern!r:.100}")
        kinds = [LETTERS[letter] for letter in pattern]
    head_dim = raw.get("head_dim") or raw.get("attention_head_dim")
    return raw | {"layers_block_type": kinds, "layer_types": None, "num_hidden_layers": len(kinds), "head_dim": head_dim}


def parse_recurrence(raw: dict[str, Any], family: Architecture, layers: int) -> RecurrentLayers | None:
    """Returns the recurrent layers; None if there are none.

    Raises UnsupportedModel for values that do not fit each other, and NoNativeModel for a kind of layer that there is no code for.
    """
    names = family.recurrence
    if names is None or not any(kinds := _recurrent(raw, family, names, layers)):
        return None

    def size(entry: Entry | None) -> int:
        return parse_size(raw, *entry) if entry else 0

    def flag(entry: tuple[str, bool] | None) -> bool:
        return bool(raw.get(*entry)) if entry else False

    found = RecurrentLayers(
        names=names,
        layers=kinds,
        hidden=parse_size(raw, "hidden_size"),
        taps=size(names.taps),
        count=size(names.count),
        groups=size(names.groups),
        key_size=size(names.key_size),
        value_size=_value_size(raw, names),
        tiled=bool(raw.get("linear_heads_tiled", False)),
        conv_bias=flag(names.conv_bias),
        bias=flag(names.bias),
        steps=_steps(raw),
    )
    _check(found)
    return found


def _recurrent(raw: dict[str, Any], family: Architecture, names: Recurrence, layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether it is recurrent."""
    types = parse_names(raw, "layer_types") or parse_names(raw, "layers_block_type")
    if types is None and isinstance(listed := raw.get("full_attn_idxs"), list):
        return tuple(layer not in listed for layer in range(layers))
    if types is None and names.interval:
        interval = parse_size(raw, *names.interval)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if types is None:
        raise UnsupportedModel("config.json: layer_types must say which layers are recurrent")
    known = (*ATTENTION, *names.types, *(FEEDS if family.single else ()))
    if unknown := sorted(set(types) - set(known)):
        raise NoNativeModel(f"layers of {', '.join(unknown)} have no code of ours (there is for {', '.join(known)})")
    if len(types) != layers:
        raise UnsupportedModel(f"config.json: layer_types has {len(types)} entries for {layers} layers")
    return tuple(kind in names.types for kind in types)


def _value_size(raw: dict[str, Any], names: Recurrence) -> int:
    """Returns the size of a value. Granite's config.json may say that it follows from the hidden size."""
    if names.value_size is None:
        return 0
    if names.count and raw.get(names.value_size[0], "auto") == "auto" and names.value_size[1] is None:
        return parse_size(raw, "mamba_expand", 2) * parse_size(raw, "hidden_size") // parse_size(raw, *names.count)
    return parse_size(raw, *names.value_size)


def _steps(raw: dict[str, Any]) -> tuple[float, float]:
    """Returns the limits of the steps of state spaces."""
    listed = raw.get("time_step_limit") or [0.0, math.inf]
    # transformers writes infinity as an object.
    infinite = ({"__float__": "Infinity"}, math.inf)
    limits = [math.inf if limit in infinite else limit for limit in listed] if isinstance(listed, list) else []
    if len(limits) != 2 or not all(limit in (0, math.inf) or is_positive(limit) for limit in limits) or not limits[0] < limits[1]:
        raise UnsupportedModel(f"config.json: time_step_limit must be two ascending numbers, got {listed!r:.100}")
    return float(limits[0]), float(limits[1])


def _check(found: RecurrentLayers) -> None:
    """Raises NoNativeModel for sizes that the kernels do not compute."""
    if not 2 <= found.taps <= MAX_TAPS:
        raise NoNativeModel(f"convolutions over {found.taps} tokens have no code of ours (there is for 2 to {MAX_TAPS})")
    sizes = {"key size": found.key_size, "value size": found.value_size, "channels": found.channels}
    for name, size in sizes.items():
        if size % LANES:
            raise NoNativeModel(f"recurrent layers with a {name} of {size} have no code of ours (there is for multiples of {LANES})")
    if found.count and found.count % found.groups:
        raise UnsupportedModel(f"config.json: {found.count} recurrent heads cannot share {found.groups} keys equally")
