"""What the compiler makes of paged attention, with the launch settings of each device, for the shapes of well-known models."""

from __future__ import annotations

from itertools import product

import pytest
from compile_gate import FULL
from offline import SHARED_MEMORY, VERSION, Compiled, compiled, most_spilled

from chairlift.kernels import launch_settings, paged_combine, paged_decode, paged_prefill
from chairlift.kernels.launch_settings import DeviceLimits, HeadShape, LaunchSettings, decode_settings, prefill_settings, shared_memory

pytestmark = pytest.mark.slow

METADATA = {
    "slots_ptr": "*i32",
    "query_starts_ptr": "*i32",
    "context_lens_ptr": "*i32",
    "block_tables_ptr": "*i32:16",
    "work_ptr": "*i32:16",
    "qk_scale": "fp32",
    "cap": "fp32",
    "table_stride": "i32",
    "q_token_stride": "i32:16",
    "q_head_stride": "i32:16",
}
"""Arguments of both kernels. Arrays anywhere in the step's buffers count as aligned to one of their numbers."""

MODELS = {
    "smollm2-135m": (3, 3, 64, 64, {}),
    "phi-2": (32, 1, 80, 80, {}),
    "phi-3-mini": (32, 1, 96, 96, {"window": 2047}),
    "llama-3.1-8b": (8, 4, 128, 128, {}),
    "qwen2.5-7b": (4, 7, 128, 128, {}),
    "gpt-oss-20b": (8, 8, 64, 64, {"window": 128, "sinks": True}),
    "deepseek-v3": (128, 1, 192, 128, {}),
    "gemma-2-9b": (8, 2, 256, 256, {"window": 4096, "softcap": True}),
    "gemma-4-full": (2, 8, 512, 512, {}),
    "deepseek-v3-latents": (1, 128, 576, 512, {"latents": True}),
    "glm-4.7-flash": (1, 20, 576, 512, {"latents": True}),
}
"""KV heads, query heads per KV head, dimensions of keys and values, and options. Latents are keys, and values are their first numbers."""

DTYPES = {"bf16": (2, "bf16", 2), "fp16": (2, "fp16", 2), "fp32": (4, "fp32", 4), "bf16, fp8 cache": (2, "fp8e4nv", 1)}
"""Bytes of a query, the dtype of the cache and its bytes."""

FEW_BYTES, SOME_BYTES = 64, 512
"""Bytes a thread that may be spilled: up to 16 registers, and more where fp32 is multiplied by threads or an output has 512 dimensions."""

SAMPLE = [
    (80, "llama-3.1-8b", "bf16"),
    (86, "smollm2-135m", "fp32"),
    (89, "gemma-2-9b", "bf16"),
    (89, "llama-3.1-8b", "bf16, fp8 cache"),
    (90, "llama-3.1-8b", "bf16"),
    (90, "deepseek-v3", "fp16"),
    (89, "deepseek-v3-latents", "bf16"),
    # Older versions take the most shared memory here, beside what `launch_settings` counts on.
    *([(100, "smollm2-135m", "bf16")] if VERSION < (3, 9) else []),
]
CASES = [
    (capability, model, dtype)
    for capability, model, dtype in (product(SHARED_MEMORY, MODELS, DTYPES) if FULL else SAMPLE)
    # Products of e4m3 need sm_89. fp16 compiles as bf16 does.
    if not (("fp8" in dtype and capability < 89) or (FULL and dtype == "fp16" and model != "llama-3.1-8b"))
    # Four queries of 512 fp32 numbers do not fit into 99 KiB, nor 16 of 576: `launch_settings` refuses them.
    if not ((model == "gemma-4-full" or "latents" in MODELS[model][4]) and dtype == "fp32" and SHARED_MEMORY[capability] < 1 << 17)
]


def limits(capability: int) -> DeviceLimits:
    return DeviceLimits(divmod(capability, 10), SHARED_MEMORY[capability], 100)


def shape(model: str, dtype: str, tokens: int = 1) -> HeadShape:
    kv_heads, group, dim, value_dim, _ = MODELS[model]
    query, _, cache = DTYPES[dtype]
    return HeadShape(launch_settings._group(group, dim, tokens) if kv_heads == 1 else group, dim, value_dim, query, cache)


def build(kernel: object, capability: int, model: str, dtype: str, settings: LaunchSettings, tokens: int = 1, **more: object) -> Compiled:
    """Compiles a kernel for a model whose cache has keys and values in turns, or latents, in blocks of 16 tokens."""
    kv_heads, heads, dim, value_dim, options = MODELS[model]
    group = shape(model, dtype, tokens).group
    kind, cell, size = dtype.partition(",")[0], dim + value_dim, 16
    # Of blocks, heads and tokens.
    strides = (kv_heads * size * cell, size * dim, dim), (kv_heads * size * cell, size * value_dim, value_dim)
    if "latents" in options:
        strides = ((size * dim, 0, dim),) * 2
    (k_block, k_head, k_token), (v_block, v_head, v_token) = strides
    scales = "*fp32:16" if "fp8" in dtype else None
    arguments = METADATA | dict.fromkeys(("out_ptr", "q_ptr"), f"*{kind}:16") | dict.fromkeys(("k_ptr", "v_ptr"), f"*{DTYPES[dtype][1]}:16")
    arguments |= {
        "sinks_ptr": "*fp32:16" if options.get("sinks") else None,
        "k_scales_ptr": scales,
        "v_scales_ptr": scales,
        "k_block_stride": k_block,
        "k_head_stride": k_head,
        "k_token_stride": k_token,
        "v_block_stride": v_block,
        "v_head_stride": v_head,
        "v_token_stride": v_token,
        "KV_HEADS": kv_heads * heads // group,
        "GROUP": group,
        "HEAD_DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": size,
        "WINDOW": options.get("window", 0),
        "SOFTCAP": "softcap" in options,
        "BLOCK_M": settings.BLOCK_M,
        "BLOCK_N": settings.BLOCK_N,
    }
    return compiled(kernel, arguments | more, capability=capability, num_warps=settings.num_warps, num_stages=settings.num_stages)


def check(found: Compiled, kernel: str, capability: int, model: str, dtype: str, settings: LaunchSettings, tokens: int = 1) -> None:
    """The kernel launches, keeps to its registers and loads keys and values 16 bytes at a time."""
    assert found.shared_memory <= SHARED_MEMORY[capability]
    # What `launch_settings` counts on, so that no other shape can exceed the device either.
    assert found.shared_memory <= shared_memory(shape(model, dtype, tokens), settings, divmod(capability, 10))
    usual = FEW_BYTES if dtype != "fp32" and MODELS[model][3] <= 256 else SOME_BYTES
    assert found.spilled <= most_spilled(usual, kernel, capability, model, dtype)
    assert found.loads[16] > 0
    assert set(found.loads) <= {4, 8, 16}


@pytest.mark.parametrize(("capability", "model", "dtype"), CASES)
def test_prefill(capability, model, dtype):
    settings = prefill_settings(shape(model, dtype), limits(capability))
    chunk = settings.BLOCK_M // shape(model, dtype).group
    found = build(paged_prefill._paged_prefill_kernel, capability, model, dtype, settings, CHUNK_TOKENS=chunk)
    check(found, "prefill", capability, model, dtype, settings)
    if dtype != "fp32":
        # wgmma takes 64 rows, and for latents there are registers for 32.
        wide = capability == 90 and "latents" not in MODELS[model][4]
        assert found.wgmma if wide else found.mma or "tcgen05.mma" in found.ptx


@pytest.mark.parametrize("tokens", [1, paged_decode.MAX_DECODE] if FULL else [1])
@pytest.mark.parametrize(("capability", "model", "dtype"), CASES)
def test_decode(capability, model, dtype, tokens):
    settings = decode_settings(shape(model, dtype, tokens), tokens, limits(capability))
    more = {"partial_out_ptr": "*fp32:16", "lse_ptr": "*fp32:16", "SINGLE_TOKEN": tokens == 1}
    found = build(paged_decode._paged_decode_kernel, capability, model, dtype, settings, tokens, **more)
    check(found, f"decode of {tokens}", capability, model, dtype, settings, tokens)
    if dtype != "fp32":
        assert found.mma


@pytest.mark.parametrize("capability", SHARED_MEMORY if FULL else [90])
def test_combine(capability):
    given = {"out_ptr": "*bf16:16", "partial_out_ptr": "*fp32:16", "lse_ptr": "*fp32:16", "sinks_ptr": None, "work_ptr": "*i32:16"}
    sizes = {"HEADS": 32, "HEAD_DIM": 128, "BLOCK_N": paged_combine.BLOCK_N}
    found = compiled(paged_combine._paged_combine_kernel, given | sizes, capability=capability)
    assert found.spilled == 0
    assert found.loads[16]
