"""Chooses the dtypes of weights and KV cache, and the quantization."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.models.experts import MXFP4_GROUP
from chairlift.models.shape import ModelShape
from chairlift.runner.cuda import dotted
from chairlift.runner.memory.decision import Decision, asked, gib

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
"""Bytes of one number of each dtype, without scales."""
EIGHT_BITS = ("int8", "fp8")
"""The quantizations of torch (see `layers.linear`)."""
WEIGHT_BLOCK, WEIGHT_SCALE_BYTES = 32, 2
"""int8 weights per scale in Rust, and the scale's bytes."""
MXFP4_BLOCK_BYTES = 17
"""Bytes of a block of MXFP4."""
ROW_SCALE_BYTES = 4
"""Bytes of the scale of a row of 8-bit weights in torch."""
FP8_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with fp8 products. Rows and columns must be multiples of FP8_ALIGNMENT."""
FP8_ALIGNMENT = 16
BEYOND_FLOAT16 = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM")
"""Architectures whose activations exceed float16's largest number, 65504. vLLM computes none of them in float16 either.

Those that square numbers do too.
"""

Bf16Products = Literal["none", "vectors", "tiles"]
"""The unit that multiplies bfloat16 numbers."""

ROOM = 512 << 20
"""Bytes that must be free beside the unquantised weights."""

NO_FP8 = "--quantization fp8 is for CUDA devices: int8 takes as little on a CPU"


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of weights and KV cache: float32, float16 or bfloat16; weights also blocks, KV also int8 or fp8.

    "blocks" are a GGUF file's quantised blocks. `quantization` is none, int8, fp8 or the method of a quantised checkpoint. int8 computes
    with integers in Rust; for torch see `Linear`. `compute` is the dtype of activations, in Rust of those that are multiplied: float32,
    bfloat16, or int16, which is 16 bits of them (see `_core.Linear`). With `rounds_activations`, products with the checkpoint's weights
    of fp8 round them to fp8 too.
    """

    weights: str
    quantization: str
    kv: str
    compute: str = "float32"
    rounds_activations: bool = False
    decisions: tuple[Decision, ...] = field(default=(), compare=False)
    """The choices and their reasons: weights, arithmetic, and KV dtype."""

    @property
    def packed(self) -> str:
        """The dtype of `_core.Linear`."""
        if self.quantization == "int8":
            return "int8"
        return {"int16": "int16", "bfloat16": "rounded"}.get(self.compute, self.weights.replace("blocks", "kept"))


def decide(
    config: EngineConfig,
    model: ModelShape,
    available: int,
    blocks: tuple[int, int] = (0, 0),
    *,
    in_torch: bool = False,
    capability: tuple[int, int] = FP8_CAPABILITY,
    bf16: Bf16Products = "none",
    byte_products: bool = False,
    is_gguf: bool = False,
) -> Precision:
    """Chooses the dtypes that the settings leave open, for `available` bytes of free memory. The settings' device is cpu or cuda.

    In several processes `model` is the part of one. `blocks` are the bytes of a GGUF file's blocks and of its tensors that become fp32; 0
    for other checkpoints. `in_torch` is whether torch computes the model on a CPU, and `is_gguf` whether torch reads a GGUF file.
    `capability` is the CUDA device's compute capability. `bf16` is the unit that multiplies bfloat16 in the CPU kernels' instruction set,
    and `byte_products` whether it multiplies the codes of blocks as bytes.

    Raises InvalidSetting if the device does not support a setting or the weights do not fit.
    """
    if config.device == "cuda" or in_torch:
        return _in_torch(config, model, available, capability, is_gguf)
    if config.kv_cache_dtype == "fp8":
        raise InvalidSetting("--kv-cache-dtype fp8 is for CUDA devices: int8 takes as little on a CPU")
    if config.quantization == "fp8":
        raise InvalidSetting(NO_FP8)
    if config.cpu_math == "int16" and (config.quantization == "int8" or config.dtype != "auto"):
        raise InvalidSetting("--cpu-math int16 multiplies weights as they are in the file: leave out --quantization and --dtype")
    weights, why = _weights(config, model, blocks, available)
    size = sum(blocks) if weights == "blocks" else weight_bytes(model, weights)
    quantization, why_quantized = _quantization(config, model, weights, size, available, bf16)
    short = quantization == "none" and _rounds_to_int16(config, model, weights, bf16, byte_products)
    if quantization == "int8":
        compute, weights_decision = "float32", Decision("weights", "int8", why_quantized)
        arithmetic = Decision("arithmetic", "int8", "activations of 8 bits, as the weights")
    elif _rounds(config, bf16):
        compute, weights = "bfloat16", "blocks" if weights == "blocks" else "bfloat16"
        weights_decision = Decision("weights", weights, f"{asked('--cpu-math')}: products in bfloat16")
        arithmetic = Decision("arithmetic", compute, asked("--cpu-math"))
    else:
        compute = "int16" if short else "float32"
        weights_decision = Decision("weights", weights, f"{why}; {why_quantized}")
        arithmetic = Decision("arithmetic", compute, _why_arithmetic(config, short))
    kv, why_kv = _kv(config, bf16 != "none", short)
    decisions = (weights_decision, arithmetic, Decision("KV dtype", kv, why_kv))
    return Precision(weights, quantization, kv, compute, decisions=decisions)


def _rounds(config: EngineConfig, bf16: Bf16Products) -> bool:
    """Whether weights and activations are rounded to bfloat16 for each product."""
    return config.cpu_math == "fast" and bf16 == "tiles" and config.dtype == "auto"


def _rounds_to_int16(config: EngineConfig, model: ModelShape, weights: str, bf16: Bf16Products, byte_products: bool) -> bool:
    """Whether activations are rounded to 16 bits for each product. Raises InvalidSetting if that was asked for and the processor cannot."""
    if config.cpu_math == "int16" and not byte_products:
        raise InvalidSetting("--cpu-math int16: this instruction set does not multiply bytes (those with AVX-512 VNNI do); leave it out")
    if config.cpu_math not in ("auto", "int16") or not byte_products or config.dtype != "auto":
        return False
    if config.cpu_math == "auto":
        return weights == "blocks" and bf16 != "tiles"
    return weights == "blocks" or (weights == "bfloat16" and bf16 == "tiles" and model.quantization is None)


def _why_arithmetic(config: EngineConfig, short: bool) -> str:
    """The reason for products with activations of 16 bits, or with all of their bits."""
    if config.cpu_math == "exact" or (config.cpu_math == "int16" and short):
        return asked("--cpu-math")
    if short:
        return "16 bits of each activation, faster than 24 (--cpu-math exact)"
    if config.cpu_math == "int16":
        return "no activation is rounded: --cpu-math int16 is for a GGUF file's blocks, and with AMX for a checkpoint's bfloat16"
    return "no activation is rounded"


def _kv(config: EngineConfig, bf16: bool, short: bool) -> tuple[str, str]:
    """The CPU kernels' dtype of the KV cache and the reason. `short` is whether activations are rounded to 16 bits."""
    even = config.block_size % 2 == 0
    if config.kv_cache_dtype == "bfloat16" and not (bf16 and even):
        reason = "blocks must have an even size (--block-size)" if bf16 else "this instruction set does not multiply bfloat16"
        raise InvalidSetting(f"--kv-cache-dtype bfloat16: {reason}; float16 takes as little memory")
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype, asked("--kv-cache-dtype")
    if config.cpu_math == "fast":
        return ("bfloat16" if bf16 and even else "float16"), asked("--cpu-math")
    if short:
        return "float16", "as close as activations of 16 bits; half the memory of float32 (--kv-cache-dtype)"
    return "float32", "exact; float16 takes half as much memory, int8 a bit more than a quarter (--kv-cache-dtype)"


def weight_bytes(model: ModelShape, dtype: str) -> int:
    """Bytes of all weights with a dtype of BYTES; int8 as in Rust."""
    numbers = model.num_weights
    return numbers * BYTES[dtype] + (numbers // WEIGHT_BLOCK * WEIGHT_SCALE_BYTES if dtype == "int8" else 0)


def torch_weight_bytes(model: ModelShape, dtype: str, compute: str = "bfloat16", *, packs_experts: bool = False) -> int:
    """Bytes of all weights in torch with a dtype of BYTES. int8 and fp8 apply to the layers' matrices; other weights have dtype `compute`.

    A transformers model is not quantised here. `dtype` may also be the name of the model's quantization scheme, if it is our own. With
    `packs_experts` quantised experts are kept as they are, as on a CUDA device.
    """
    if not isinstance(model, ModelConfig):
        return model.num_weights * BYTES[compute if dtype in EIGHT_BITS else dtype]
    matrices = [(1, sizes) for sizes in model.matrices]
    experts = [(model.expert_mlps, sizes) for sizes in model.expert_matrices] if packs_experts else []
    if experts and model.experts and model.experts.mxfp4:
        numbers = sum(count * math.prod(sizes) for count, sizes in experts)
        return (model.num_weights - numbers) * BYTES[compute] + numbers * MXFP4_BLOCK_BYTES // MXFP4_GROUP
    if model.scheme and dtype == model.scheme.name:
        saved = (count * (math.prod(sizes) * BYTES[compute] - model.scheme.weight_bytes(*sizes)) for count, sizes in matrices + experts)
        return model.num_weights * BYTES[compute] - sum(saved)
    if dtype not in EIGHT_BITS:
        return model.num_weights * BYTES[dtype]
    numbers = sum(count * math.prod(sizes) for count, sizes in matrices + experts)
    scales = sum(count * outs for count, (outs, _) in matrices + experts) * ROW_SCALE_BYTES
    return (model.num_weights - numbers) * BYTES[compute] + numbers * BYTES[dtype] + scales


def _weights(config: EngineConfig, model: ModelShape, blocks: tuple[int, int], available: int) -> tuple[str, str]:
    """The CPU kernels' dtype of weights and the reason: lossless unless a flag sets it or memory is short."""
    if config.dtype != "auto":
        return config.dtype, asked("--dtype")
    kept, rest = blocks
    if kept:
        return "blocks", "the checkpoint's own" + (f"; float32 where it has other types, {gib(rest)} of it" if rest else "")
    if model.dtype in ("bfloat16", "float16"):
        packed = model.quantization if config.load_format != "dummy" else None
        origin = f"the checkpoint's {packed} multiplied out" if packed else "as in the checkpoint"
        return model.dtype, origin
    size = weight_bytes(model, "float32")
    if size + ROOM <= available:
        return "float32", "as in the checkpoint; float16 takes half the memory and traffic (--dtype)"
    return "float16", f"in float32 they would take {gib(size)}"


def _quantization(config: EngineConfig, model: ModelShape, weights: str, size: int, available: int, bf16: Bf16Products) -> tuple[str, str]:
    """The CPU kernels' quantization and the reason."""
    if config.quantization != "auto":
        return config.quantization, asked("--quantization")
    if config.cpu_math == "fast" and config.dtype == "auto" and not _rounds(config, bf16):
        return "int8", asked("--cpu-math")
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


def _in_torch(config: EngineConfig, model: ModelShape, available: int, capability: tuple[int, int], is_gguf: bool) -> Precision:
    """torch's choice: one dtype for weights, activations and KV."""
    quantised = model.quantization if config.load_format != "dummy" else None
    quantization = config.quantization if config.quantization in EIGHT_BITS else None
    if quantization:
        _check_quantization(quantization, config, model, quantised, capability)
    compute, why = _compute(config, model, available, quantised, quantization, is_gguf)
    kv, why_kv = compute, "the compute dtype" if quantised or quantization else "as the weights"
    weights = compute
    per_token = quantised is not None and _per_token(config, model, compute, capability)
    if quantised:
        weights, why = f"{quantised}, in {compute}", "as in the checkpoint" + (", activations rounded to fp8 too" if per_token else "")
    elif quantization:
        weights, why = f"{quantization}, in {compute}", asked("--quantization")
    if config.kv_cache_dtype == "fp8" and config.device == "cuda":
        _check_fp8("--kv-cache-dtype fp8", capability, "leave it out")
        kv, why_kv = "fp8", asked("--kv-cache-dtype")
    elif config.kv_cache_dtype not in ("auto", compute):
        raise InvalidSetting(
            f"--kv-cache-dtype {config.kv_cache_dtype}: torch stores KV in the weights' dtype, {compute}, or on a CUDA device in fp8; "
            "leave it out"
        )
    arithmetic = Decision("arithmetic", "fp8" if per_token or quantization == "fp8" else compute, "the dtype of activations")
    decisions = (Decision("weights", weights, why), arithmetic, Decision("KV dtype", kv, why_kv))
    return Precision(compute, quantised or quantization or "none", kv, compute, per_token, decisions)


def _compute(
    config: EngineConfig, model: ModelShape, available: int, quantised: str | None, quantization: str | None, is_gguf: bool
) -> tuple[str, str]:
    """torch's dtype of activations and the reason. It is the checkpoint's on a CUDA device, float32 on a CPU if that fits."""
    large = model.architecture in BEYOND_FLOAT16 or (isinstance(model, ModelConfig) and model.activation == "relu2")
    if config.dtype == "float16" and large:
        raise InvalidSetting(f"--dtype float16: activations of {model.architecture} exceed its largest number; take bfloat16")
    if config.dtype != "auto":
        return config.dtype, asked("--dtype")
    if quantization == "fp8":
        return "bfloat16", "the output dtype of fp8 products"
    if config.device != "cuda" and not quantised:
        return _fitting(model, available, quantization)
    if is_gguf:
        return "bfloat16", "a GGUF file's numbers, multiplied out; float32 rounds none and takes twice the memory (--dtype)"
    if model.dtype == "float16" and large:
        return "bfloat16", "activations exceed float16's largest number"
    if model.dtype in ("float16", "float32", "bfloat16"):
        return model.dtype, "as in the checkpoint"
    return "bfloat16", "the checkpoint names no supported dtype"


def _per_token(config: EngineConfig, model: ModelShape, compute: str, capability: tuple[int, int]) -> bool:
    """Whether products of a checkpoint that was made for activations in fp8 are computed so."""
    if not isinstance(model, ModelConfig) or model.scheme is None or not model.scheme.per_token:
        return False
    aligned = all(size % FP8_ALIGNMENT == 0 for sizes in model.matrices for size in sizes)
    return aligned and compute == "bfloat16" and config.device == "cuda" and capability >= FP8_CAPABILITY


def _check_quantization(
    quantization: str, config: EngineConfig, model: ModelShape, quantised: str | None, capability: tuple[int, int]
) -> None:
    """Raises InvalidSetting if the model or the device does not support 8-bit weights in torch."""
    if quantised:
        raise InvalidSetting(f"--quantization {quantization}: the checkpoint is quantised already, with {quantised}; leave it out")
    if not isinstance(model, ModelConfig):
        raise InvalidSetting(
            f"--quantization {quantization} is for Chairlift's own models, and {model.architecture} runs in transformers: "
            "leave it out, or use a checkpoint that is quantised already"
        )
    if model.experts and config.device != "cuda":
        raise InvalidSetting(f"--quantization {quantization}: torch computes the experts of {model.architecture} in 16 bits: leave it out")
    if quantization != "fp8":
        return
    if config.device != "cuda":
        raise InvalidSetting(NO_FP8)
    if config.dtype not in ("auto", "bfloat16"):
        raise InvalidSetting(f"--quantization fp8 computes in bfloat16, and not in {config.dtype}: leave --dtype out")
    odd = sorted({size for sizes in model.matrices for size in sizes if size % FP8_ALIGNMENT})
    if odd:
        raise InvalidSetting(f"--quantization fp8 needs matrices whose sides are multiples of {FP8_ALIGNMENT}, not of {odd[0]}: take int8")
    _check_fp8("--quantization fp8", capability, "take int8")


def _check_fp8(flag: str, capability: tuple[int, int], remedy: str) -> None:
    """Raises InvalidSetting if a device of this compute capability does not compute with fp8."""
    if capability < FP8_CAPABILITY:
        least, here = dotted(FP8_CAPABILITY), dotted(capability)
        raise InvalidSetting(f"{flag} needs a device of compute capability {least}, and this one has {here}: {remedy}")


def _fitting(model: ModelShape, available: int, quantization: str | None) -> tuple[str, str]:
    """torch's compute dtype on a CPU and the reason. Weights have the same dtype or 8 bits."""
    size, half = (torch_weight_bytes(model, quantization or compute, compute) for compute in ("float32", "bfloat16"))
    if size + ROOM <= available:
        return "float32", "exact, and the quickest for torch on most CPUs"
    if half > available:
        raise InvalidSetting(
            f"the weights take {gib(size)}, in bfloat16 {gib(half)}, and {gib(available)} of memory are free: use a smaller model "
            "(--dtype bfloat16 tries all the same)"
        )
    return "bfloat16", f"slower and less exact; in float32 they would take {gib(size)}, and {gib(available)} of memory are free"
