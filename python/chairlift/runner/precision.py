"""In which form weights, keys and values are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.runner.decision import Decision, asked, gib

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Of one number in each form, without scales."""
WEIGHT_BLOCK, WEIGHT_SCALE_BYTES = 32, 2
"""Weights of int8 that share a scale, and its bytes."""

ROOM = 512 << 20
"""Bytes that must be left beside the weights as they come. A host needs twice as much: the rest is taken by the imports before."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights and KV are kept: float32, float16 or bfloat16 each; weights also as blocks, KV also as int8.

    Blocks are those of integers that a GGUF file has, computed with in fp32. `quantization` is none or int8, which computes with
    integers too.
    """

    weights: str
    quantization: str
    kv: str
    decisions: tuple[Decision, ...] = field(default=(), compare=False)
    """The same in words, with the reasons."""


def decide(config: EngineConfig, model: ModelConfig, available: int, blocks: tuple[int, int] = (0, 0)) -> Precision:
    """Chooses what the settings leave open, for a machine with `available` bytes of free memory and the settings' device, cpu or cuda.

    `blocks` are the bytes of a GGUF file's own blocks, where the checkpoint was made of such, and of what is fp32 beside them.

    Raises InvalidSetting for what the device cannot do, or where the weights fit in no form.
    """
    if config.device == "cuda":
        return _on_cuda(config, model)
    weights, why = _weights(config, model, blocks, available)
    size = sum(blocks) if weights == "blocks" else weight_bytes(model, weights)
    quantization, why_quantized = _quantization(config, model, weights, size, available)
    forms = {"int8": Decision("weights", "int8", why_quantized), "none": Decision("weights", weights, f"{why}; {why_quantized}")}
    if config.kv_cache_dtype == "auto":
        kv, why_kv = "float32", "exact; float16 takes half as much memory, int8 a bit more than a quarter (--kv-cache-dtype)"
    else:
        kv, why_kv = config.kv_cache_dtype, asked("--kv-cache-dtype")
    return Precision(weights, quantization, kv, (forms[quantization], Decision("KV form", kv, why_kv)))


def weight_bytes(model: ModelConfig, form: str) -> int:
    """Bytes of all weights in a form, a key of BYTES."""
    queries, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * queries + 2 * kv + 3 * model.intermediate_size + 2)
    tables = 1 if model.tie_word_embeddings else 2
    numbers = model.num_layers * layer + model.hidden_size * (tables * model.vocab_size + 1)
    return numbers * BYTES[form] + (numbers // WEIGHT_BLOCK * WEIGHT_SCALE_BYTES if form == "int8" else 0)


def _weights(config: EngineConfig, model: ModelConfig, blocks: tuple[int, int], available: int) -> tuple[str, str]:
    """How the CPU keeps weights, and why: nothing is lost unless somebody asks, or memory is short."""
    if config.dtype != "auto":
        return config.dtype, asked("--dtype")
    kept, rest = blocks
    if kept:
        # Norms are a thousandth of a model: more is matrices of types that are not kept as they are.
        return "blocks", "the GGUF file's own, computed with in float32" + (
            "; float32 where it has other types" if rest > kept // 20 else ""
        )
    if model.dtype in ("bfloat16", "float16"):
        return model.dtype, "as in the checkpoint, computed with in float32"
    size = weight_bytes(model, "float32")
    if size + ROOM <= available:
        return "float32", "as in the checkpoint; float16 takes half the memory and traffic (--dtype)"
    return "float16", f"computed with in float32; in float32 they would take {gib(size)}"


def _quantization(config: EngineConfig, model: ModelConfig, weights: str, size: int, available: int) -> tuple[str, str]:
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


def _on_cuda(config: EngineConfig, model: ModelConfig) -> Precision:
    """One form for all, the checkpoint's own if it is a usual one."""
    if config.quantization == "int8":
        raise InvalidSetting("--quantization int8 is for --device cpu so far: leave it out on a CUDA device")
    if config.dtype != "auto":
        weights, why = config.dtype, asked("--dtype")
    elif model.dtype in ("float16", "float32", "bfloat16"):
        weights, why = model.dtype, "as in the checkpoint"
    else:
        weights, why = "bfloat16", "the checkpoint names no usual form"
    if config.kv_cache_dtype not in ("auto", weights):
        raise InvalidSetting(
            f"--kv-cache-dtype {config.kv_cache_dtype}: a CUDA device keeps KV in the form of the weights so far, {weights}; leave it out"
        )
    return Precision(weights, "none", weights, (Decision("weights", weights, why), Decision("KV form", weights, "as the weights")))
