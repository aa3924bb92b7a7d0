"""What sm_90 makes of the kernels of paged attention, for the shapes of well-known models."""

from __future__ import annotations

import pytest
import torch
from sm90 import SHARED_MEMORY, compiled
from triton import next_power_of_2

from chairlift.kernels import paged_combine, paged_decode, paged_prefill
from chairlift.kernels.paged_tile import block_n

POINTERS = {
    "slots_ptr": "*i32",
    "query_starts_ptr": "*i32",
    "context_lens_ptr": "*i32",
    "block_tables_ptr": "*i32:16",
    "qk_scale": "fp32",
    "cap": "fp32",
    "table_stride": "i32",
    "q_token_stride": "i32:16",
    "q_head_stride": "i32:16",
}
"""Of the arguments that all have: what lies anywhere in the step's buffers is taken to be aligned to a number of its own alone."""

MODELS = {
    "llama-3.1-8b": (8, 4, 128, 128, {}),
    "llama-3.1-8b, 8-bit cache": (8, 4, 128, 128, {"fp8": True}),
    "smollm2-135m": (3, 3, 64, 64, {}),
    "qwen2.5-7b": (4, 7, 128, 128, {}),
    "gpt-oss-20b": (8, 8, 64, 64, {"window": 128, "sinks": True}),
    "gemma-2-9b": (8, 2, 256, 256, {"window": 4096, "softcap": True}),
    "gemma-4, a layer that sees all": (2, 8, 512, 512, {}),
    "phi-2": (32, 1, 80, 80, {}),
    "deepseek-v3": (128, 1, 192, 128, {}),
}
"""KV heads, query heads to each, dimensions of keys and values, and what else there is."""

LARGE_GROUPS = ["qwen2.5-7b", "gpt-oss-20b", "gemma-4, a layer that sees all"]
"""Of these, those where chunks of several tokens take more rows than those of one."""


def arguments(model: str) -> dict[str, object]:
    """What both kernels take for a model, in bf16, with keys and values in turns, as the cache has them."""
    kv_heads, group, dim, value_dim, more = MODELS[model]
    cell, size = dim + value_dim, 16
    kind = "*fp8e4nv:16" if more.get("fp8") else "*bf16:16"
    cache = torch.empty(0, dim, dtype=torch.float8_e4m3fn if more.get("fp8") else torch.bfloat16)
    return POINTERS | {
        "out_ptr": "*bf16:16",
        "q_ptr": "*bf16:16",
        "k_ptr": kind,
        "v_ptr": kind,
        "sinks_ptr": "*fp32:16" if more.get("sinks") else None,
        "k_scales_ptr": "*fp32:16" if more.get("fp8") else None,
        "v_scales_ptr": "*fp32:16" if more.get("fp8") else None,
        "k_block_stride": kv_heads * size * cell,
        "k_head_stride": size * dim,
        "k_token_stride": dim,
        "v_block_stride": kv_heads * size * cell,
        "v_head_stride": size * value_dim,
        "v_token_stride": value_dim,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": size,
        "WINDOW": more.get("WINDOW", 0),
        "SOFTCAP": "softcap" in more,
        "BLOCK_N": block_n(cache),
    }


def tile_bytes(given: dict[str, object]) -> int:
    """Shared memory that a tile of keys and values takes."""
    width = sum(next_power_of_2(given[name]) for name in ("HEAD_DIM", "VALUE_DIM"))
    return given["BLOCK_N"] * width * (1 if "fp8" in given["k_ptr"] else 2)


@pytest.mark.parametrize(("model", "single"), [*((model, True) for model in MODELS), *((model, False) for model in LARGE_GROUPS)])
def test_decode_reads_wide_and_keeps_to_registers(model, single):
    given = arguments(model) | {"partial_out_ptr": "*fp32:16", "lse_ptr": "*fp32:16", "work_ptr": "*i32:16", "SINGLE_TOKEN": single}
    height = paged_decode.block_m(single, given["GROUP"])
    found = compiled(
        paged_decode._paged_decode_kernel, given | {"BLOCK_M": height}, num_warps=paged_decode.num_warps(height, given["VALUE_DIM"])
    )
    assert found.spilled == 0
    # Two tiles or more, since one is read while the other is computed with.
    assert 2 * tile_bytes(given) <= found.shared_memory <= SHARED_MEMORY
    assert found.loads[16] > 0
    assert set(found.loads) <= {4, 8, 16}


@pytest.mark.parametrize("model", MODELS)
def test_prefill_multiplies_fast_and_keeps_to_registers(model):
    given = arguments(model)
    shape = given["GROUP"], given["VALUE_DIM"]
    given |= {"work_ptr": "*i32:16", "CHUNK_TOKENS": paged_prefill.tile_tokens(*shape), "BLOCK_M": paged_prefill.block_m(*shape)}
    found = compiled(paged_prefill._paged_prefill_kernel, given, num_warps=8, num_stages=paged_prefill.num_stages(shape[1]))
    # Results of 512 dimensions fill the registers of all warps that one product may have.
    assert found.spilled <= (64 if shape[1] > 256 else 0)
    assert found.wgmma > 0
    assert found.shared_memory <= SHARED_MEMORY
    assert set(found.loads) <= {4, 8, 16}


def test_combine_reads_wide():
    given = {"out_ptr": "*bf16:16", "partial_out_ptr": "*fp32:16", "lse_ptr": "*fp32:16", "sinks_ptr": None, "work_ptr": "*i32:16"}
    found = compiled(
        paged_combine._paged_combine_kernel, given | {"HEADS": 32, "HEAD_DIM": 128, "BLOCK_N": paged_combine.BLOCK_N}, num_warps=4
    )
    assert found.spilled == 0
    assert found.loads[16]
