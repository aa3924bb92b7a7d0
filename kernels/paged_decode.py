"""Paged attention for decodes: the last few tokens of each sequence. Bound by reading keys and values once.

As in FlashInfer, a fixed grid of programs takes units of work from a list planned on the host. As in Flash-Decoding, a long context is
split into several units, whose results `paged_combine` merges. The reference in torch is `chairlift.layers.attention`.
"""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment,misc,operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.launch_settings import decode_settings, device_limits, head_shape
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

MAX_DECODE = 4
"""A chunk of at most this many tokens is attended to as a decode, as in the core's `decode_work`."""
PROGRAMS_PER_SM = 8
"""Programs in the grid per multiprocessor: a few more than run at once, so that an uneven last wave costs little."""


@jit(do_not_specialize=["table_stride"])
def _paged_decode_kernel(
    out_ptr,
    partial_out_ptr,
    lse_ptr,
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
    SINGLE_TOKEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The heads of a group share keys and values. A unit is a range of keys of one KV head; its BLOCK_M rows are (token, head of the group).
    offs_d = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    offs_dv = tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    token = tl.arange(0, BLOCK_M) // GROUP
    group_head = tl.arange(0, BLOCK_M) % GROUP
    offs_n = tl.arange(0, BLOCK_N)
    for unit in range(tl.program_id(0), tl.load(work_ptr) * KV_HEADS, tl.num_programs(0)):
        kv_head = unit % KV_HEADS
        split_ptr = work_ptr + 4 * (1 + unit // KV_HEADS)
        sequence = tl.load(split_ptr)
        first = tl.load(split_ptr + 1)
        end = tl.load(split_ptr + 2)
        start = tl.load(query_starts_ptr + sequence)
        query_len = tl.load(query_starts_ptr + sequence + 1) - start
        position = tl.load(context_lens_ptr + sequence) - query_len + token
        head = kv_head * GROUP + group_head
        is_query = token < query_len
        q_offsets = (start + token).to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
        q_mask = is_query[:, None] & (offs_d < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + q_offsets[:, None] + offs_d[None, :], mask=q_mask, other=0.0)
        qk_head_scale = qk_scale
        if k_scales_ptr is not None:
            qk_head_scale = qk_scale * tl.load(k_scales_ptr + kv_head)
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, offs_dv.shape[0]), tl.float32)
        k_head_ptr = k_ptr + kv_head * k_head_stride
        v_head_ptr = v_ptr + kv_head * v_head_stride
        # Tiles start at fixed positions whatever the window. The block table is read one tile ahead, because Triton cannot
        # pipeline a load whose address comes from another load.
        block_table_ptr = block_tables_ptr + tl.load(slots_ptr + sequence).to(tl.int64) * table_stride
        begin = first // BLOCK_N * BLOCK_N
        blocks = tl.load(block_table_ptr + (begin + offs_n) // BLOCK_SIZE, mask=begin + offs_n < end, other=0)
        for start_n in range(begin, end, BLOCK_N):
            next_key = start_n + BLOCK_N + offs_n
            next_blocks = tl.load(block_table_ptr + next_key // BLOCK_SIZE, mask=next_key < end, other=0)
            key = start_n + offs_n
            in_range = (key >= first) & (key < end)
            cell = key % BLOCK_SIZE
            k = load_kv_tile(k_head_ptr, blocks, cell, in_range, k_block_stride, k_token_stride, HEAD_DIM, True)
            v = load_kv_tile(v_head_ptr, blocks, cell, in_range, v_block_stride, v_token_stride, VALUE_DIM, True)
            qk = qk_tile(q, k, qk_head_scale, cap, SOFTCAP)
            visible = in_range[None, :]
            if not SINGLE_TOKEN:
                visible = visible & (key[None, :] <= position[:, None])
                if WINDOW > 0:
                    visible = visible & (key[None, :] > position[:, None] - WINDOW)
            qk = tl.where(visible, qk, float("-inf"))
            m_i, l_i, acc = softmax_update(qk, v.to(q.dtype), m_i, l_i, acc)
            blocks = next_blocks
        if v_scales_ptr is not None:
            acc *= tl.load(v_scales_ptr + kv_head)
        partial = tl.load(split_ptr + 3)
        if sinks_ptr is not None:  # noqa: SIM102 -- a compile-time test; the next one is at run time
            # With several splits the merge adds the sink.
            if partial < 0:
                sink = tl.load(sinks_ptr + head, mask=is_query, other=0.0).to(tl.float32) * LOG2E
                l_i, acc = add_sink(sink, m_i, l_i, acc)
        # A token may see no key of a split that other tokens of its chunk see.
        acc /= tl.where(l_i == 0, 1.0, l_i)[:, None]
        row = token.to(tl.int64) * (KV_HEADS * GROUP) + head
        place = row[:, None] * VALUE_DIM + offs_dv[None, :]
        mask = is_query[:, None] & (offs_dv < VALUE_DIM)[None, :]
        if partial < 0:
            first_ptr = out_ptr + start.to(tl.int64) * (KV_HEADS * GROUP * VALUE_DIM)
            tl.store(first_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            first_row = partial.to(tl.int64) * (KV_HEADS * GROUP)
            tl.store(partial_out_ptr + first_row * VALUE_DIM + place, acc, mask=mask)
            tl.store(lse_ptr + first_row + row, tl.where(l_i == 0, float("-inf"), m_i + tl.log2(l_i)), mask=is_query)


def paged_decode(
    out: torch.Tensor,
    parts: torch.Tensor,
    lses: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    scoring: Scoring,
    *,
    work: torch.Tensor,
    splits: int,
    queries: int,
) -> None:
    """Attends from query [T, heads, D] to keys [blocks, kv_heads, block_size, D] and values [.., Dv], all contiguous along the last axis.

    `work` int32 comes from the core's `decode_work`. `splits` bounds the number of splits in it, so that a captured graph fits several
    steps; `queries` bounds the tokens of a chunk. Tokens with one split are written to `out` [T, heads, Dv], contiguous. Other tokens
    leave partial outputs parts [n, heads, Dv] and log-sum-exps lses [n, heads], fp32, for `paged_combine`. Other rows of `out` are not
    touched.
    """
    limits, single = device_limits(query.device), queries == 1
    tokens = 1 if single else MAX_DECODE
    shape = head_shape(query, keys, values, tokens)
    groups = query.shape[1] // shape.group
    keys, values, scales = spread_heads(groups, keys, values, scoring.scales)
    factor, cap = score_factors(scoring)
    settings = decode_settings(shape, tokens, limits)
    grid = (min(splits * groups, PROGRAMS_PER_SM * limits.multiprocessors),)
    _paged_decode_kernel[grid](
        out,
        parts,
        lses,
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
        SINGLE_TOKEN=single,
        **settings._asdict(),
    )
