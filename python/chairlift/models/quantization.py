"""Parses how a checkpoint's layers are quantised: `quantization_config` of its config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.models.fields import Entries, parse_table, read_json

SUPPORTED = (
    "compressed-tensors of 8-bit floats or of 4- or 8-bit integers, fp8, ModelOpt FP8, NVFP4, MLX, bitsandbytes and AutoRound of 4 bits, "
    "GPTQ and AWQ, and GGUF files"
)
FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where older versions of ModelOpt, AutoGPTQ and AutoAWQ describe the quantization, instead of in config.json, and their methods."""
NVFP4_GROUP = 16
MIN_GROUP = 16
"""Fewest columns of a scale: the inner side of a GPU's products."""
_DESCRIPTIVE = re.compile(
    # Which layers are quantised, which is seen in their tensors. MLX names each of them.
    r"\w*(modules|layers|targets|ignored?|block_name|block_list|model_part)\w*|.*\..*|include_input_output_embeddings"
    # How the weights were made. Their tensors have the order of columns, and the zeros.
    r"|\w*version|quantized_by|producer|quantization_status|global_compression_ratio"
    r"|meta|model_\w+|tokenizer|dataset|damp_\w+|true_sequential|static_groups"
    r"|desc_act|sym|act_group_aware|hyb_act|mse|iters|(minmax_)?lr|nsamples|seqlen"
    r"|\w*batch_size|gradient_\w+|amp|train_bs|enable_\w+|not_use_best_mse|dynamic_max_gap"
    r"|sampler|low_\w+|cache_block_outputs|pad_token_id|max_input_length|device"
    r"|offload_\w+|parallel_packing|auto_gptq|quant_lm_head|scale_dtype|super_\w+"
    # How other programs compute, or whether they do it without the checkpoint's numbers.
    r"|run_compressed|dequantize|use_\w+|\w*exllama\w*|inject_\w+|do_fuse"
    r"|fuse_max_seq_len|backend|method|pack_dtype|(bnb|llm_int8|_?load_in)_\w+"
    # How activations and the cache are rounded, which is done here for some of the schemes, more finely.
    r"|activation_scheme|act_\w+|(weight|act)_per_tensor|kv_cache_\w+|scale_fmt"
    # What follows from other settings.
    r"|format|config_groups|zero_point|bits|group_size|has_zero_point"
)
"""Settings that change nothing here, or that are read with others alone."""
_CHANGES = re.compile(
    r"\w*(rotat|hadamard|transform|permut|codebook|outlier|smooth|clip|spars|residual|adapter|lora|lut|norm|scale|zero|bits|dtype|type|format|pack|order"
    r"|group|algo|layout|mode|axis|dynamic|expert)\w*"
)
"""Settings that change the weights that the tensors stand for."""


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """A layer's weights are e4m3 numbers (8 bits) or integers of 4 bits.

    `method` is compressed-tensors, fp8, modelopt, gptq or awq; AutoRound has the layouts of the last two. A scale is of `group` columns, or
    of a whole row if `group` is 0, and of `block_rows` rows. Stored zeros are `zero_offset` less than they mean. `per_token` means that the
    model is made for activations in e4m3; they are rounded with a scale of each token, also where the checkpoint has one scale for all.
    Which layers are quantised is seen in their tensors. Weights of another `kind` (nvfp4, nf4, int8, integers) are not kept packed.
    They are multiplied out when they are loaded, on a CPU alone, as are those of several `parts`, each the scheme of some layers. `unread`
    are settings that nothing here knows.
    """

    method: str
    bits: int
    group: int = 0
    block_rows: int = 1
    zero_offset: int = 0
    per_token: bool = False
    kind: str = ""
    parts: tuple[QuantizationScheme, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)

    @property
    def numbers(self) -> str:
        """What the weights are in."""
        return self.kind or ("e4m3" if self.bits == 8 else "int4")

    @property
    def name(self) -> str:
        """The scheme in words."""
        return f"{self.method} {self.numbers}"

    def weight_bytes(self, outs: int, ins: int) -> int:
        """Bytes of a weight in torch, with scales of four bytes for e4m3 and of two for integers, which also have zeros."""
        groups = -(-ins // self.group) if self.group else 1
        return outs * (ins * self.bits // 8 + groups * (4 if self.bits == 8 else 3))


class UnsupportedScheme(Exception):
    """There is no native code for a checkpoint's quantization."""


def described_beside(directory: Path) -> tuple[str, dict[str, Any]] | None:
    """Returns the name of the file beside config.json that describes the quantization, and a `quantization_config`; None without one."""
    name = next((name for name in FILES if (directory / name).is_file()), None)
    if name is None:
        return None
    found = read_json(directory, name)
    found = found if isinstance(found, dict) else {}
    if FILES[name] == "modelopt":
        found = parse_table(found, "quantization")
    return name, {**found, "quant_method": FILES[name]}


def parse_quantization(found: Any) -> QuantizationScheme | None:
    """Parses a `quantization_config`; returns None if it quantises no weights.

    Raises UnsupportedScheme, also for a setting that would change the weights and that nothing here knows.
    """
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method is None and isinstance(found, dict) and found.keys() >= {"group_size", "bits"}:
        method = "mlx"  # which names no method
    if method == "compressed-tensors" and not found.get("config_groups") and found.get("kv_cache_scheme"):
        return None
    try:
        scheme = METHODS[str(method)](settings := Entries(found))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f" ({error})" if type(error) is ValueError else ""
        raise UnsupportedScheme(f"a checkpoint quantised with {method}{why} has no code of ours (there is for {SUPPORTED})") from None
    for group in filter(None, (part.group for part in (scheme, *scheme.parts))):
        if group < MIN_GROUP or group & (group - 1):
            raise UnsupportedScheme(f"quantised groups of {group} have no code of ours (there is for powers of two from {MIN_GROUP})")
    return replace(scheme, unread=_unknown(str(method), settings.unread()))


def _unknown(method: str, unread: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns which settings that a method's parser did not read change nothing. Raises UnsupportedScheme for one that may."""
    unknown = [name for name, value in unread.items() if value and name != "quant_method" and not _DESCRIPTIVE.fullmatch(name)]
    if grave := next((name for name in unknown if _CHANGES.fullmatch(name)), None):
        raise UnsupportedScheme(f"{grave} {unread[grave]!r:.100} of a checkpoint quantised with {method} has no code of ours")
    return tuple(f"quantization_config.{name}" for name in unknown)


def _compressed_tensors(found: Mapping[str, Any]) -> QuantizationScheme:
    """Documented in https://github.com/neuralmagic/compressed-tensors."""
    if (found.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("sparse")
    _check_transforms((found.get("transform_config") or {}).get("config_groups") or {})
    return _mixed(_group(group, group.get("format") or found["format"]) for group in found["config_groups"].values())


def _mixed(schemes: Iterable[QuantizationScheme]) -> QuantizationScheme:
    """Returns the scheme of all layers, or one of several whose layers differ in their tensors."""
    parts = tuple(dict.fromkeys(schemes))
    if len(parts) == 1:
        return parts[0]
    if not parts:
        raise ValueError("no groups of layers")
    numbers = [part.numbers for part in parts]
    if len(set(numbers)) < len(parts) or set(numbers) - {"e4m3", "int4", "nvfp4"}:
        raise ValueError("in several ways")
    return QuantizationScheme(parts[0].method, 8, kind=" and ".join(numbers), parts=parts)


def _check_transforms(groups: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for rotations of activations (SpinQuant, QuIP), which transformers leaves out; weights hold their own."""
    places = {part["location"] for group in groups.values() for part in group["apply"]}
    if online := sorted(places - {"weight_input", "weight_output"}):
        raise UnsupportedModel(f"config.json: transform_config rotates activations ({', '.join(online)}), and there is no code for that")


_GROUP = {
    *("weights", "targets", "format", "input_activations", "output_activations"),
    *("type", "num_bits", "strategy", "group_size", "block_structure", "symmetric", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
}
"""The settings of a group of layers, and of its weights: those that are read here, that tensors tell, or of how they were made."""


def _group(group: Mapping[str, Any], layout: str) -> QuantizationScheme:
    weights = group["weights"]
    if unknown := [name for part in (group, weights) for name, value in part.items() if value and name not in _GROUP]:
        raise ValueError(unknown[0])
    kind, strategy = f"{weights['type']}{weights['num_bits']}", weights["strategy"]
    if kind == "float8" and layout in ("float-quantized", "naive-quantized") and strategy in ("tensor", "channel", "block"):
        rows, columns = weights["block_structure"] if strategy == "block" else (1, 0)
        inputs = group.get("input_activations") or {}
        per_token = columns == 0 and inputs.get("type") == "float" and inputs.get("strategy") in ("token", "tensor")
        return QuantizationScheme("compressed-tensors", 8, _size(columns), _size(rows), per_token=per_token)
    if kind == "float4" and layout == "nvfp4-pack-quantized" and weights.get("group_size") == NVFP4_GROUP:
        return QuantizationScheme("compressed-tensors", 4, kind="nvfp4")
    if kind == "int8" and layout in ("int-quantized", "naive-quantized", "pack-quantized") and strategy in ("tensor", "channel", "group"):
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise ValueError(f"actorder {weights['actorder']}")
        return QuantizationScheme("compressed-tensors", 8, _size(weights["group_size"]) if strategy == "group" else 0, kind="int8")
    if kind == "int4" and layout == "pack-quantized" and strategy in ("group", "channel"):
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise ValueError(f"actorder {weights['actorder']}")
        return QuantizationScheme("compressed-tensors", 4, _size(weights["group_size"]) if strategy == "group" else 0)
    raise ValueError(f"{kind}, {layout}, {strategy}")


def _fp8(found: Mapping[str, Any]) -> QuantizationScheme:
    """DeepSeek's and Qwen's fp8, with scales of blocks, or with one for each matrix."""
    if found.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(found["fmt"])
    if found.get("expert_dtype") not in (None, "fp8"):
        raise ValueError(f"experts in {found['expert_dtype']}")
    rows, columns = found.get("weight_block_size") or (1, 0)
    return QuantizationScheme("fp8", 8, _size(columns), _size(rows), per_token=columns == 0)


def _modelopt(found: Mapping[str, Any]) -> QuantizationScheme:
    """NVIDIA's ModelOpt, documented in https://github.com/NVIDIA/Model-Optimizer: NVFP4, or e4m3 with a scale of a matrix or row."""
    algorithm, layers = str(found["quant_algo"]), found.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" and layers:
        return _mixed(map(_modelopt, layers.values()))
    if algorithm == "NVFP4" and found.get("group_size", NVFP4_GROUP) == NVFP4_GROUP:
        return QuantizationScheme("modelopt", 4, kind="nvfp4")
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise ValueError(algorithm)
    return QuantizationScheme("modelopt", 8, per_token=True)


def _gptq(found: Mapping[str, Any]) -> QuantizationScheme:
    """Documented by AutoGPTQ and GPTQModel."""
    layout = found.get("checkpoint_format") or found.get("format") or "gptq"
    if found["bits"] not in (4, 8) or layout not in ("gptq", "gptq_v2") or found.get("is_marlin_format"):
        raise ValueError(f"{found['bits']} bits, {layout}")
    # Rules that begin with -: leave layers whole, which is seen in their tensors.
    if found.get("lm_head") or any(rule for name, rule in (found.get("dynamic") or {}).items() if not name.startswith("-:")):
        raise ValueError("other bits in some layers, or a quantised head")
    # The first version stores zeros less 1.
    kind = "int8" if found["bits"] == 8 else ""
    return QuantizationScheme("gptq", found["bits"], _size(found["group_size"]), zero_offset=int(layout == "gptq"), kind=kind)


def _bitsandbytes(found: Mapping[str, Any]) -> QuantizationScheme:
    """Documented in https://huggingface.co/docs/bitsandbytes: 4 bits."""
    if not (found.get("load_in_4bit") or found.get("_load_in_4bit")):
        raise ValueError("8 bits")
    return QuantizationScheme("bitsandbytes", 4, kind="nf4")


def _awq(found: Mapping[str, Any]) -> QuantizationScheme:
    """Documented by AutoAWQ."""
    bits, version = found.get("bits", found.get("w_bit")), str(found.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or not found.get("zero_point", True):
        raise ValueError(f"{bits} bits, {version}, zero_point {found.get('zero_point', True)}")
    return QuantizationScheme("awq", 4, _size(found.get("group_size", found.get("q_group_size"))))


def _mlx(found: Mapping[str, Any]) -> QuantizationScheme:
    """Apple's MLX: integers with scales and biases of groups. The tensors tell the bits and the group of each layer."""
    for settings in (found, *(value for value in found.values() if isinstance(value, dict))):
        if settings.get("mode", "affine") != "affine":
            raise ValueError(f"mode {settings['mode']}")
    return QuantizationScheme("mlx", found["bits"], kind="integers")


def _auto_round(found: Mapping[str, Any]) -> QuantizationScheme:
    """Intel's AutoRound, which packs integers in GPTQ's or AWQ's layout: https://github.com/intel/auto-round."""
    layers = [layer for layer in (found.get("extra_config") or {}).values() if layer.get("bits", 16) < 16]  # the others are not quantised
    for settings in (found, *layers):
        if settings.get("bits") != 4 or settings.get("data_type", "int") != "int" or settings.get("act_bits", 16) < 16:
            raise ValueError(f"{settings.get('bits')} bits of {settings.get('data_type')}")
        if settings.get("group_size", found["group_size"]) != found["group_size"]:
            raise ValueError("in several ways")
    layout = str(found.get("packing_format") or found.get("backend"))
    if layout == "auto_round:auto_awq":
        return QuantizationScheme("awq", 4, _size(found["group_size"]))
    # The layout of AutoGPTQ stores zeros less 1, and AutoRound's own does not.
    return QuantizationScheme("gptq", 4, _size(found["group_size"]), zero_offset=AUTO_ROUND_OFFSETS[layout])


AUTO_ROUND_OFFSETS = {"auto_round:auto_gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}
"""By how much stored zeros are less than they mean, by AutoRound's names of layouts."""


def _size(size: Any) -> int:
    """The columns of a group, or the rows of a block. -1 and 0 mean all."""
    if isinstance(size, bool) or not isinstance(size, int) or size < -1:
        raise ValueError(f"a size of {size!r}")
    return max(size, 0)


METHODS: dict[str, Callable[[Mapping[str, Any]], QuantizationScheme]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mlx": _mlx,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
}
"""Parsers by `quant_method`."""
