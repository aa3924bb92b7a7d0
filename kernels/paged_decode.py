"""Attention of the last few tokens of each sequence over a paged cache: bound by reading keys and values once.

As in FlashInfer, a fixed grid of programs takes units of work from a list planned on the host; as in Flash-Decoding, a long context is
several units, whose results `paged_combine` puts together. The reference in torch is `chairlift.layers.attention`'s.
"""

# Triton has no types: mypy checks the launchers alone.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,assignment,misc,operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.paged_tile import (
    LOG2E,
    Scoring,
    Step,
    add_sink,
    add_tile,
    load_tile,
    multiprocessors,
    score_factors,
    score_tile,
    tile_keys,
)

MAX_DECODE = 4
"""Tokens of a chunk that is attended to as a decode, as in the core's `decode_work`."""
PROGRAMS_PER_SM = 8
"""Programs of the grid for each multiprocessor: some more than run at once, so that an uneven last round costs little."""


@triton.jit(do_not_specialize=["table_stride"])
def _paged_decode_kernel(
    out_ptr,
    parts_ptr,
    lses_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    sinks_ptr,
    key_scales_ptr,
    value_scales_ptr,
    tables_ptr,
    rows_ptr,
    query_starts_ptr,
    context_lens_ptr,
    work_ptr,
    factor,
    cap,
    table_stride,
    query_token_stride,
    query_head_stride,
    key_block_stride: tl.constexpr,
    key_head_stride: tl.constexpr,
    key_cell_stride: tl.constexpr,
    value_block_stride: tl.constexpr,
    value_head_stride: tl.constexpr,
    value_cell_stride: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    capped: tl.constexpr,
    single: tl.constexpr,
    height: tl.constexpr,
    tile: tl.constexpr,
):
    # The heads of a group share keys and values: a unit is some keys of one KV head, and its rows are (token, head of the group).
    dims = tl.arange(0, triton.next_power_of_2(dim))
    value_dims = tl.arange(0, triton.next_power_of_2(value_dim))
    token = tl.arange(0, height) // group
    member = tl.arange(0, height) % group
    cells = tl.arange(0, tile)
    for unit in range(tl.program_id(0), tl.load(work_ptr) * kv_heads, tl.num_programs(0)):
        kv_head = unit % kv_heads
        split_ptr = work_ptr + 4 * (1 + unit // kv_heads)
        sequence = tl.load(split_ptr)
        first = tl.load(split_ptr + 1)
        end = tl.load(split_ptr + 2)
        start = tl.load(query_starts_ptr + sequence)
        count = tl.load(query_starts_ptr + sequence + 1) - start
        position = tl.load(context_lens_ptr + sequence) - count + token
        head = kv_head * group + member
        real = token < count
        query_at = (start + token).to(tl.int64) * query_token_stride + head.to(tl.int64) * query_head_stride
        query_mask = real[:, None] & (dims < dim)[None, :]
        query = tl.load(query_ptr + query_at[:, None] + dims[None, :], mask=query_mask, other=0.0)
        scores_factor = factor
        if key_scales_ptr is not None:
            scores_factor = factor * tl.load(key_scales_ptr + kv_head)
        top = tl.full((height,), float("-inf"), tl.float32)
        total = tl.zeros((height,), tl.float32)
        mixed = tl.zeros((height, value_dims.shape[0]), tl.float32)
        head_keys_ptr = keys_ptr + kv_head * key_head_stride
        head_values_ptr = values_ptr + kv_head * value_head_stride
        # Tiles lie at fixed positions whatever the window, and the next one's blocks are looked up while this one's keys are on
        # their way: a load that waits for another load cannot be pipelined.
        table_ptr = tables_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_stride
        begin = first // tile * tile
        blocks = tl.load(table_ptr + (begin + cells) // block_size, mask=begin + cells < end, other=0)
        for at in range(begin, end, tile):
            next_key = at + tile + cells
            next_blocks = tl.load(table_ptr + next_key // block_size, mask=next_key < end, other=0)
            key = at + cells
            seen = (key >= first) & (key < end)
            cell = key % block_size
            keys = load_tile(head_keys_ptr, blocks, cell, seen, key_block_stride, key_cell_stride, dim, True)
            values = load_tile(head_values_ptr, blocks, cell, seen, value_block_stride, value_cell_stride, value_dim, True)
            scores = score_tile(query, keys, scores_factor, cap, capped)
            visible = seen[None, :]
            if not single:
                visible = visible & (key[None, :] <= position[:, None])
                if window > 0:
                    visible = visible & (key[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
            top, total, mixed = add_tile(scores, values.to(query.dtype), top, total, mixed)
            blocks = next_blocks
        if value_scales_ptr is not None:
            mixed *= tl.load(value_scales_ptr + kv_head)
        part = tl.load(split_ptr + 3)
        if sinks_ptr is not None:  # noqa: SIM102 -- this is decided when it is compiled, the next when it runs
            # Of several splits none counts the sink: it waits for the merge.
            if part < 0:
                sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2E
                total, mixed = add_sink(sink, top, total, mixed)
        # A token may see nothing of a split that others of its chunk see.
        mixed /= tl.where(total == 0, 1.0, total)[:, None]
        row = token.to(tl.int64) * (kv_heads * group) + head
        place = row[:, None] * value_dim + value_dims[None, :]
        mask = real[:, None] & (value_dims < value_dim)[None, :]
        if part < 0:
            first_ptr = out_ptr + start.to(tl.int64) * (kv_heads * group * value_dim)
            tl.store(first_ptr + place, mixed.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            first_row = part.to(tl.int64) * (kv_heads * group)
            tl.store(parts_ptr + first_row * value_dim + place, mixed, mask=mask)
            tl.store(lses_ptr + first_row + row, tl.where(total == 0, float("-inf"), top + tl.log2(total)), mask=real)


def height(single: bool, group: int) -> int:
    """Rows of a unit: the heads of a group for one token or up to MAX_DECODE, and no less than a product of matrices has."""
    return max(16, int(triton.next_power_of_2(group if single else MAX_DECODE * group)))


def warps(height: int, value_dim: int) -> int:
    """As many as hold the results of a unit in half of their registers."""
    return 4 if height * value_dim <= 8192 else 8


def paged_decode(
    out: torch.Tensor,
    parts: torch.Tensor,
    lses: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: Step,
    scoring: Scoring,
    *,
    work: torch.Tensor,
    splits: int,
    queries: int,
) -> None:
    """Attends from query [T, heads, D] to keys [blocks, kv_heads, block_size, D] and values [.., Dv], all contiguous along the last axis.

    `work` int32 is what the core's `decode_work` made, of which `splits` is an upper bound of the splits (so that a graph can be kept
    for several steps) and `queries` of the tokens in a chunk. Tokens of one split are written to `out` [T, heads, Dv], contiguous; of
    others parts [n, heads, Dv] and the logarithms of their sums lses [n, heads], fp32, are left for `paged_combine`. Others' rows are
    not touched.
    """
    kv_heads, block_size, dim = keys.shape[1:]
    group = query.shape[1] // kv_heads
    factor, cap = score_factors(scoring)
    single = queries == 1
    rows = height(single, group)
    grid = (min(splits * kv_heads, PROGRAMS_PER_SM * multiprocessors(query.device)),)
    _paged_decode_kernel[grid](
        out,
        parts,
        lses,
        query,
        keys,
        values,
        scoring.sinks,
        *(scoring.scales or (None, None)),
        *step,
        work,
        factor,
        cap,
        step.tables.stride(0),
        query.stride(0),
        query.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        value_dim=values.shape[-1],
        block_size=block_size,
        window=scoring.window or 0,
        capped=bool(scoring.softcap),
        single=single,
        height=rows,
        tile=tile_keys(keys),
        num_warps=warps(rows, values.shape[-1]),
        num_stages=3,
    )
