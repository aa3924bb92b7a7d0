"""Reads LoRA adapters: in peft's format (adapter_config.json and adapter_model.safetensors), or GGUF files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift.checkpoint.gguf_parts import is_gguf
from chairlift.checkpoint.regular_files import check_files
from chairlift.checkpoint.safetensors_file import DTYPES, Array, SafetensorsFile, as_float32
from chairlift.errors import UnsupportedModel

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

    from chairlift.checkpoint.gguf_adapter import GGUFAdapter

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers that an adapter can change."""
FUSED = ("qkv_proj", "gate_up_proj")
"""Those that Phi-3 has instead of some of them."""
OTHER_NAMES = {"self_attn.out_proj": "o_proj", "feed_forward.w1": "gate_proj", "feed_forward.w3": "up_proj", "feed_forward.w2": "down_proj"}
OTHER_NAMES |= {"self_attn.gate_proj": "gates of attention"}
"""Their names in LFM2, and a module of Trinity that has the name of another."""
REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of B",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "embeddings of single tokens",
    "layer_replication": "repeated layers",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "alora_invocation_tokens": "an activation by tokens of the prompt (activated LoRA)",
    "target_parameters": "updates of parameters that are no linear layers (target_parameters)",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal updates (BD-LoRA)",
    "arrow_config": "a choice of adapters for each token (Arrow)",
}
"""Fields of adapter_config.json that must be unset, and what they ask for."""
IGNORED = frozenset(
    (
        *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode"),
        *("r", "rank_pattern", "lora_alpha", "alpha_pattern", "lora_dropout", "use_rslora", "bias", "init_lora_weights"),
        *("target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("qalora_group_size", "megatron_config", "megatron_core", "ensure_weight_tying"),
    )
)
"""Fields that are used elsewhere here, or that only matter in training: the file with the matrices says what is updated."""
BASE_CHANGES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights that change the base's weights too."""
_MAX_ALPHA = 1e9
_EXPONENTS = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""The bits of the exponent of a number of each dtype. All are set in NaN and in infinite numbers."""

_NAME = re.compile(r"(?:.*\.)?layers\.(\d{1,5})\.((?:self_attn|mlp|mixer|feed_forward)\.(\w+))\.lora_([AB])\.weight")

_IMAGES = re.compile(r"\b(vision|visual|image|audio)")
"""Names of the parts of a model that read images or sounds, whose layers have the names of a decoder's."""


class LowRank(NamedTuple):
    """The update of one linear layer: A [rank, inputs] and B [outputs, rank], in the dtype `kind`, as bytes.

    `scale` is the factor of B A. If `alternates`, the halves of B's rotary rows alternate, as in GGUF files of some architectures.
    """

    kind: str
    a: Array
    b: Array
    inputs: int
    outputs: int
    rank: int
    scale: float
    alternates: bool = False


class Factors:
    """The ranks and the factors of updates that adapter_config.json sets."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError, with the reason, for values that are no ranks, no alphas or no patterns."""
        rank: Any = config.get("r")
        alpha: Any = config.get("lora_alpha")
        if not _is_rank(rank) or not _is_alpha(alpha):
            raise ValueError(f"r is {rank!r:.50} and lora_alpha {alpha!r:.50} in adapter_config.json")
        self._rank: int = rank
        self._alpha: float = alpha
        self._ranks, self._alphas = (_patterns(config, name) for name in ("rank_pattern", "alpha_pattern"))
        if not all(_is_rank(value) for _, value in self._ranks) or not all(_is_alpha(value) for _, value in self._alphas):
            raise ValueError("rank_pattern or alpha_pattern has a value that is no rank or no alpha")
        self._by_root = bool(config.get("use_rslora"))

    def of(self, layer: str, rank: int) -> tuple[int, float]:
        """Returns the rank and the factor of the update of a linear layer. Raises ValueError if its matrices' rank is another."""
        # As in peft (get_pattern_key), the first pattern counts that matches the end of the name.
        expected = next((value for pattern, value in self._ranks if pattern.isinstance_python(layer)), self._rank)
        alpha = next((value for pattern, value in self._alphas if pattern.isinstance_python(layer)), self._alpha)
        if rank != expected:
            raise ValueError(f"do not have the rank r = {expected}" + (", as rank_pattern says" if self._ranks else ""))
        return rank, alpha / (math.sqrt(rank) if self._by_root else rank)


class AdapterHeader:
    """An adapter's settings, and the names and shapes of its matrices."""

    def __init__(self, path: Path) -> None:
        """Opens a directory or a GGUF file. Raises UnsupportedModel, with one line, if it is missing, corrupt, or more than LoRA."""
        self.path, self._alternates = path, False
        self._file: SafetensorsFile | GGUFAdapter
        self._factors: Factors | GGUFAdapter
        try:
            if is_gguf(path):
                self._open_gguf()
            else:
                self._open_directory()
        except ValueError as error:
            raise self._unsupported(str(error)) from None

    @property
    def rank(self) -> int:
        """The highest rank of an update; 0 without one."""
        return max((entry.shape[0] for name, entry in self._file.tensors.items() if ".lora_A." in name and entry.shape), default=0)

    def _open_gguf(self) -> None:
        from chairlift.checkpoint.gguf_adapter import GGUFAdapter

        file = GGUFAdapter(self.path)
        self._hash = hashlib.blake2b(repr((file.alpha, file.alternates)).encode(), digest_size=16)
        self._file, self._factors, self._alternates = file, file, file.alternates

    def _open_directory(self) -> None:
        check_files(self.path.glob("*"))
        config = self._read_config()
        for field, what in REFUSED.items():
            if config.get(field):
                raise self._unsupported(f"it has {what}, which adapters cannot have here")
        if unknown := [field for field, value in config.items() if value and field not in IGNORED | REFUSED.keys()]:
            raise self._unsupported(f"adapter_config.json sets {unknown[0]:.50}, which is not known here and may change answers")
        if config.get("peft_type") != "LORA":
            raise self._unsupported(f"peft_type is {config.get('peft_type')!r:.50}, not 'LORA'")
        if config.get("bias", "none") != "none":
            raise self._unsupported("it changes biases, which adapters cannot do here: train it with bias='none'")
        if str(config.get("init_lora_weights")).lower().startswith(BASE_CHANGES):
            raise self._unsupported(
                f"init_lora_weights {config['init_lora_weights']!r:.50} also changes the base: convert it to plain LoRA"
            )
        path = self.path / "adapter_model.safetensors"
        if not path.exists():
            raise self._unsupported("adapter_model.safetensors is missing: save the adapter with safe_serialization")
        self._file, self._factors = SafetensorsFile(path), Factors(config)

    def _read_config(self) -> dict[str, Any]:
        path = self.path / "adapter_config.json"
        try:
            text = path.read_bytes()
            config = json.loads(text)
        except OSError as error:
            raise self._unsupported(
                f"adapter_config.json cannot be read ({error.strerror}): an adapter is a directory in peft's format, or a GGUF file"
            ) from None
        except (ValueError, RecursionError) as error:
            raise self._unsupported(f"adapter_config.json is not JSON ({error})") from None
        if not isinstance(config, dict):
            raise self._unsupported("adapter_config.json holds no object")
        self._hash = hashlib.blake2b(text, digest_size=16)
        return config

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"adapter {self.path}: {reason}")


class AdapterFiles(AdapterHeader):
    """An adapter with its matrices and the hash of its files."""

    def __init__(self, path: Path) -> None:
        """Reads a directory or a GGUF file. Raises UnsupportedModel, with one line, if it is missing, corrupt, or more than LoRA."""
        super().__init__(path)
        try:
            self.updates = self._read_updates()
            """By layer and module."""
        except ValueError as error:
            raise self._unsupported(str(error)) from None

    def _read_updates(self) -> dict[tuple[int, str], LowRank]:
        matrices: dict[tuple[int, str], dict[str, str]] = {}
        for name in self._file.tensors:
            match = None if _IMAGES.search(name) else _NAME.fullmatch(name)
            module = match and OTHER_NAMES.get(match[2], match[3])
            if match is None or module not in MODULES + FUSED:
                raise self._unsupported(f"it changes {name}: only {', '.join(MODULES + FUSED)} can have updates")
            position = int(match[1]), module
            found = matrices.setdefault(position, {})
            if match[4] in found:
                raise self._unsupported(f"{found[match[4]]} and {name} both change {module} of layer {position[0]}")
            found[match[4]] = name
        if not matrices:
            raise self._unsupported("it has no matrices")
        return {position: self._update(position, names) for position, names in sorted(matrices.items())}

    def _update(self, position: tuple[int, str], names: dict[str, str]) -> LowRank:
        (layer, module), file = position, self._file
        if names.keys() != {"A", "B"}:
            raise self._unsupported(f"layer {layer} has only one of the two matrices of {module}")
        a, b = (file.tensors[names[which]] for which in "AB")
        matrices = f"{module} of layer {layer} has matrices of {list(a.shape)} and {list(b.shape)}, which"
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise self._unsupported(f"{matrices} have no common rank")
        try:
            rank, scale = self._factors.of(names["A"].removeprefix("base_model.model.").removesuffix(".lora_A.weight"), a.shape[0])
        except ValueError as error:
            raise ValueError(f"{matrices} {error}") from None
        if unknown := {a.dtype, b.dtype} - DTYPES.keys():
            raise self._unsupported(f"{module} of layer {layer} is in {min(unknown)}: expected {', '.join(DTYPES)}")
        data = []
        for which, entry in zip("AB", (a, b), strict=True):
            data.append(file.data(names[which]))
            if not _is_finite(data[-1], entry.dtype):
                raise self._unsupported(f"{names[which]} has numbers that are NaN or infinite: train or convert the adapter again")
            self._hash.update(names[which].encode() + b"\0")
            self._hash.update(data[-1].data)
        kind = DTYPES[a.dtype][0]
        if a.dtype != b.dtype:
            kind, data = "float32", [_as_float32(part, entry.dtype) for part, entry in zip(data, (a, b), strict=True)]
        alternates = self._alternates and module in ("q_proj", "k_proj")
        return LowRank(kind, data[0], data[1], a.shape[1], b.shape[0], rank, scale, alternates)

    @property
    def digest(self) -> bytes:
        """The hash of the configuration and the matrices: 16 bytes."""
        return self._hash.digest()


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MAX_ALPHA < value < _MAX_ALPHA


def _patterns(config: Mapping[str, Any], name: str) -> list[tuple[SchemaValidator, Any]]:
    """Returns the patterns of names of layers in a field, and their values."""
    if not (found := config.get(name)):
        return []
    # Its regular expressions take time that is linear in the text. Those of Python can take days for a hostile file's.
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        return [(SchemaValidator(core_schema.str_schema(pattern=rf"^(.*\.)?({pattern})$")), value) for pattern, value in found.items()]
    except (SchemaError, AttributeError):
        raise ValueError(f"{name} is not an object whose names are patterns without lookaround and backreferences") from None


def _is_finite(data: Array, dtype: str) -> bool:
    number, exponent = _EXPONENTS[dtype]
    return not bool(((data.view(number) & exponent) == exponent).any())


def _as_float32(data: Array, dtype: str) -> Array:
    number = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype]
    return as_float32(data.view(number)).view("u1")
