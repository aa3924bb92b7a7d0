"""Paged attention for prompts: FlashAttention-2 over KV blocks. Bound by the matrix products.

The reference in torch is `chairlift.layers.attention`.
"""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,misc,operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.launch_settings import device_limits, head_shape, prefill_settings
from chairlift.kernels.paged_tile import (
    LOG2E,
    AttentionMetadata,
    Scoring,
    add_sink,
    load_kv_tile,
    qk_tile,
    score_factors,
    softmax_update,
    spread_heads,
)


@jit(do_not_specialize=["table_stride"])
def _paged_prefill_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    k_scales_ptr,
    v_scales_ptr,
    block_tables_ptr,
    slots_ptr,
    query_starts_ptr,
    context_lens_ptr,
    work_ptr,
    qk_scale,
    cap,
    table_stride,
    q_token_stride,
    q_head_stride,
    k_block_stride: tl.constexpr,
    k_head_stride: tl.constexpr,
    k_token_stride: tl.constexpr,
    v_block_stride: tl.constexpr,
    v_head_stride: tl.constexpr,
    v_token_stride: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # A program has a KV head and some tokens of a chunk; its BLOCK_M rows are (token, head of the group).
    kv_head = tl.program_id(0)
    if tl.program_id(1) >= tl.load(work_ptr):
        return
    tile_ptr = work_ptr + 2 * (1 + tl.program_id(1))
    sequence = tl.load(tile_ptr)
    first = tl.load(tile_ptr + 1)
    start = tl.load(query_starts_ptr + sequence)
    context_len = tl.load(context_lens_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - start
    offs_d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    offs_dv = tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    token = tl.arange(0, BLOCK_M) // GROUP
    head = kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    is_query = (token < CHUNK_TOKENS) & (first + token < query_len)
    row = (start + first + token).to(tl.int64)
    q_offsets = row * q_token_stride + head.to(tl.int64) * q_head_stride
    q = tl.load(q_ptr + q_offsets[:, None] + offs_d[None, :], mask=is_query[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    if k_scales_ptr is not None:
        qk_scale = qk_scale * tl.load(k_scales_ptr + kv_head)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, offs_dv.shape[0]), tl.float32)
    # All queries see all keys from `begin` to `whole`. From `whole` to `end` the tiles are masked.
    position = context_len - query_len + first
    end = tl.minimum(position + CHUNK_TOKENS, context_len)
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = begin
    else:
        begin = 0
        whole = (position + 1) // BLOCK_N * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    block_table_ptr = block_tables_ptr + tl.load(slots_ptr + sequence).to(tl.int64) * table_stride
    # The block table is read one tile ahead: see `paged_decode`.
    blocks = tl.load(block_table_ptr + (begin + offs_n) // BLOCK_SIZE, mask=begin + offs_n < end, other=0)
    for start_n in range(begin, whole, BLOCK_N):
        next_key = start_n + BLOCK_N + offs_n
        next_blocks = tl.load(block_table_ptr + next_key // BLOCK_SIZE, mask=next_key < end, other=0)
        cell = (start_n + offs_n) % BLOCK_SIZE
        k = load_kv_tile(k_ptr, blocks, cell, None, k_block_stride, k_token_stride, HEAD_DIM, False)
        v = load_kv_tile(v_ptr, blocks, cell, None, v_block_stride, v_token_stride, VALUE_DIM, False)
        qk = qk_tile(q, k, qk_scale, cap, SOFTCAP)
        m_i, l_i, acc = softmax_update(qk, v.to(q.dtype), m_i, l_i, acc)
        blocks = next_blocks
    for start_n in range(whole, end, BLOCK_N):
        next_key = start_n + BLOCK_N + offs_n
        next_blocks = tl.load(block_table_ptr + next_key // BLOCK_SIZE, mask=next_key < end, other=0)
        key = start_n + offs_n
        in_range = key < end
        k = load_kv_tile(k_ptr, blocks, key % BLOCK_SIZE, in_range, k_block_stride, k_token_stride, HEAD_DIM, True)
        v = load_kv_tile(v_ptr, blocks, key % BLOCK_SIZE, in_range, v_block_stride, v_token_stride, VALUE_DIM, True)
        qk = qk_tile(q, k, qk_scale, cap, SOFTCAP)
        visible = key[None, :] <= (position + token)[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > (position + token - WINDOW)[:, None])
        m_i, l_i, acc = softmax_update(tl.where(visible, qk, float("-inf")), v.to(q.dtype), m_i, l_i, acc)
        blocks = next_blocks
    if v_scales_ptr is not None:
        acc *= tl.load(v_scales_ptr + kv_head)
    if sinks_ptr is not None:
        l_i, acc = add_sink(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E, m_i, l_i, acc)
    acc /= tl.where(l_i == 0, 1.0, l_i)[:, None]
    out_at = (row * (KV_HEADS * GROUP) + head)[:, None] * VALUE_DIM + offs_dv[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=is_query[:, None] & (offs_dv < VALUE_DIM)[None, :])


def paged_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    scoring: Scoring,
    *,
    work: torch.Tensor,
    tiles: int,
) -> None:
    """Attends from the tokens of prompt chunks; shapes are those of `paged_decode`.

    `work` int32 comes from the core's `prefill_work` for `chunk_tokens`, and `tiles` bounds the number of tiles in it. Rows of `out`
    that belong to decodes are not touched.
    """
    shape = head_shape(query, keys, values)
    groups = query.shape[1] // shape.group
    keys, values, scales = spread_heads(groups, keys, values, scoring.scales)
    settings = prefill_settings(shape, device_limits(query.device))
    factor, cap = score_factors(scoring)
    _paged_prefill_kernel[(groups, tiles)](
        out,
        query,
        keys,
        values,
        scoring.sinks,
        *scales,
        *metadata,
        work,
        factor,
        cap,
        metadata.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        KV_HEADS=groups,
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        VALUE_DIM=shape.value_dim,
        BLOCK_SIZE=keys.shape[2],
        WINDOW=scoring.window or 0,
        SOFTCAP=bool(scoring.softcap),
        CHUNK_TOKENS=settings.BLOCK_M // shape.group,
        **settings._asdict(),
    )
