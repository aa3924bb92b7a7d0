"""In which form weights, keys and values are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.layers.linear import FORMS
from chairlift.models.config import ModelConfig
from chairlift.models.shape import ModelShape
from chairlift.runner.memory.decision import Decision, asked, gib

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
"""Of one number in each form, without scales."""
WEIGHT_BLOCK, WEIGHT_SCALE_BYTES = 32, 2
"""Weights of int8 that share a scale in Rust, and its bytes."""
ROW_SCALE_BYTES = 4
"""Of the scale that a row of weights in 8 bits has in torch."""
FP8_CAPABILITY = (8, 9)
"""The first of CUDA's compute capabilities to multiply numbers of fp8, in rows and columns of which FP8_ALIGNMENT is a factor."""
FP8_ALIGNMENT = 16

ROOM = 512 << 20
"""Bytes that must be left beside the weights as they come. A host needs twice as much: the rest is taken by the imports before."""

NO_FP8 = "--quantization fp8 is for CUDA devices: int8 takes as little on a CPU"


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights and KV are kept: float32, float16 or bfloat16 each; weights also as blocks, KV also as int8 or fp8.

    Blocks are those of integers that a GGUF file has, computed with in fp32. `quantization` is none, int8 or fp8, or the method of a
    quantised checkpoint: in Rust int8 computes with integers too, for torch see `Linear`. `compute` is the form of what is between
    weights and KV.
    """

    weights: str
    quantization: str
    kv: str
    compute: str = "float32"
    decisions: tuple[Decision, ...] = field(default=(), compare=False)
    """The same in words, with the reasons."""


def decide(
    config: EngineConfig, model: ModelShape, available: int, blocks: tuple[int, int] = (0, 0), *, in_torch: bool = False
) -> Precision:
    """Chooses what the settings leave open, for a machine with `available` bytes of free memory and the settings' device, cpu or cuda.

    `blocks` are the bytes of a GGUF file's own blocks, where the checkpoint was made of such, and of what is fp32 beside them.
    `in_torch` is whether it is torch that computes on a CPU.

    Raises InvalidSetting for what the device cannot do, or where the weights fit in no form.
    """
    if config.device == "cuda" or in_torch:
        return _in_torch(config, model, available)
    if config.kv_cache_dtype == "fp8":
        raise InvalidSetting("--kv-cache-dtype fp8 is for CUDA devices: int8 takes as little on a CPU")
    if config.quantization == "fp8":
        raise InvalidSetting(NO_FP8)
    weights, why = _weights(config, model, blocks, available)
    size = sum(blocks) if weights == "blocks" else weight_bytes(model, weights)
    quantization, why_quantized = _quantization(config, model, weights, size, available)
    forms = {"int8": Decision("weights", "int8", why_quantized), "none": Decision("weights", weights, f"{why}; {why_quantized}")}
    if config.kv_cache_dtype == "auto":
        kv, why_kv = "float32", "exact; float16 takes half as much memory, int8 a bit more than a quarter (--kv-cache-dtype)"
    else:
        kv, why_kv = config.kv_cache_dtype, asked("--kv-cache-dtype")
    return Precision(weights, quantization, kv, decisions=(forms[quantization], Decision("KV form", kv, why_kv)))


def weight_bytes(model: ModelShape, form: str) -> int:
    """Bytes of all weights in a form, a key of BYTES; int8 is that of Rust."""
    numbers = model.num_weights
    return numbers * BYTES[form] + (numbers // WEIGHT_BLOCK * WEIGHT_SCALE_BYTES if form == "int8" else 0)


def torch_weight_bytes(model: ModelShape, form: str, compute: str = "bfloat16") -> int:
    """Bytes of all weights as torch keeps them in a form, a key of BYTES; in int8 and fp8 what is no layer's matrix is in `compute`.

    A model without code of ours has no such layers. Of a quantised checkpoint it is what its weights take when they are dequantised.
    """
    if form not in FORMS or not isinstance(model, ModelConfig):
        return model.num_weights * BYTES[compute if form in FORMS else form]
    numbers = model.num_layers * sum(outs * ins for outs, ins in model.layer_matrices)
    scales = model.num_layers * sum(outs for outs, _ in model.layer_matrices) * ROW_SCALE_BYTES
    return (model.num_weights - numbers) * BYTES[compute] + numbers * BYTES[form] + scales


def _weights(config: EngineConfig, model: ModelShape, blocks: tuple[int, int], available: int) -> tuple[str, str]:
    """How the CPU keeps weights, and why: nothing is lost unless somebody asks, or memory is short."""
    if config.dtype != "auto":
        return config.dtype, asked("--dtype")
    kept, rest = blocks
    if kept:
        return "blocks", "the GGUF file's own, computed with in float32" + (
            f"; float32 where it has other types, {gib(rest)} of it" if rest else ""
        )
    if model.dtype in ("bfloat16", "float16"):
        return model.dtype, "as in the checkpoint, computed with in float32"
    size = weight_bytes(model, "float32")
    if size + ROOM <= available:
        return "float32", "as in the checkpoint; float16 takes half the memory and traffic (--dtype)"
    return "float16", f"computed with in float32; in float32 they would take {gib(size)}"


def _quantization(config: EngineConfig, model: ModelShape, weights: str, size: int, available: int) -> tuple[str, str]:
    """Whether the CPU quantises weights, and why."""
    if config.quantization != "auto":
        return config.quantization, asked("--quantization")
    if size + ROOM <= available:
        return "none", f"{gib(size)} of the {gib(available)} of free memory"
    smallest = min(size, weight_bytes(model, "int8"))
    if config.dtype != "auto" or smallest == size:
        return "none", f"{gib(size)}, though {gib(available)} of memory are free"
    if smallest > available:
        raise InvalidSetting(
            f"the weights take {gib(size)}, in int8 {gib(smallest)}, and {gib(available)} of memory are free: "
            "use a smaller model, or a GGUF file of 4 bits (--quantization int8 tries all the same)"
        )
    return "int8", f"in {weights} the weights would take {gib(size)}, and {gib(available)} of memory are free"


def _in_torch(config: EngineConfig, model: ModelShape, available: int) -> Precision:
    """One form for all, since torch computes in what it keeps: the checkpoint's own on a CUDA device, fp32 on a CPU if it fits."""
    quantised = model.quantization if config.load_format != "dummy" else None
    form = config.quantization if config.quantization in FORMS else None
    if form:
        _check_form(form, config, model, quantised)
    usual = model.dtype in ("float16", "float32", "bfloat16")
    if config.dtype != "auto":
        compute, why = config.dtype, asked("--dtype")
    elif form == "fp8":
        compute, why = "bfloat16", "what products of fp8 are rounded to"
    elif config.device == "cuda" or quantised:
        compute, why = (str(model.dtype), "as in the checkpoint") if usual else ("bfloat16", "the checkpoint names no usual form")
    else:
        compute, why = _fitting(model, available, form)
    kv, why_kv = compute, "as what is computed in" if quantised or form else "as the weights"
    weights = compute
    if quantised:
        weights, why = f"{quantised}, in {compute}", "as in the checkpoint"
    elif form:
        weights, why = f"{form}, in {compute}", asked("--quantization")
    if config.kv_cache_dtype == "fp8" and config.device == "cuda":
        kv, why_kv = "fp8", asked("--kv-cache-dtype")
    elif config.kv_cache_dtype not in ("auto", compute):
        raise InvalidSetting(
            f"--kv-cache-dtype {config.kv_cache_dtype}: torch keeps KV in the form of the weights, {compute}, or on a CUDA device in fp8; "
            "leave it out"
        )
    decisions = (Decision("weights", weights, why), Decision("KV form", kv, why_kv))
    return Precision(compute, quantised or form or "none", kv, compute, decisions)


def _check_form(form: str, config: EngineConfig, model: ModelShape, quantised: str | None) -> None:
    """Refuses weights of 8 bits for a model that has none in torch, or for a device that cannot compute with them."""
    if quantised:
        raise InvalidSetting(f"--quantization {form}: the checkpoint is quantised already, with {quantised}; leave it out")
    if not isinstance(model, ModelConfig):
        raise InvalidSetting(
            f"--quantization {form} is for models with code of ours, and for {model.architecture} there is none: "
            "leave it out, or take a checkpoint that is quantised already"
        )
    if form != "fp8":
        return
    if config.device != "cuda":
        raise InvalidSetting(NO_FP8)
    if config.dtype not in ("auto", "bfloat16"):
        raise InvalidSetting(f"--quantization fp8 computes in bfloat16, and not in {config.dtype}: leave --dtype out")
    odd = sorted({size for sizes in model.layer_matrices for size in sizes if size % FP8_ALIGNMENT})
    if odd:
        raise InvalidSetting(f"--quantization fp8 needs matrices whose sides are multiples of {FP8_ALIGNMENT}, not of {odd[0]}: take int8")
    # Without a device there is nothing to ask; what is decided then is what a device would be asked for.
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else FP8_CAPABILITY
    if capability < FP8_CAPABILITY:
        here, least = (".".join(map(str, numbers)) for numbers in (capability, FP8_CAPABILITY))
        raise InvalidSetting(f"--quantization fp8 needs a device of compute capability {least}, and this one has {here}: take int8")


def _fitting(model: ModelShape, available: int, form: str | None) -> tuple[str, str]:
    """What torch computes in on a CPU, and why; the weights are in the same, or in a form of 8 bits."""
    size, half = (torch_weight_bytes(model, form or compute, compute) for compute in ("float32", "bfloat16"))
    if size + ROOM <= available:
        return "float32", "exact, and the quickest for torch on most CPUs"
    if half > available:
        raise InvalidSetting(
            f"the weights take {gib(size)}, in bfloat16 {gib(half)}, and {gib(available)} of memory are free: use a smaller model "
            "(--dtype bfloat16 tries all the same)"
        )
    return "bfloat16", f"slower and less exact; in float32 they would take {gib(size)}, and {gib(available)} of memory are free"
