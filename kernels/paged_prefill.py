"""Attention of longer chunks over a paged cache: bound by the products themselves (FlashAttention-2, over blocks).

The reference in torch is `chairlift.layers.attention`'s.
"""

# Triton has no types: mypy checks the launchers alone.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,misc,operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.paged_tile import LOG2E, Scoring, Step, add_sink, add_tile, load_tile, score_factors, score_tile, tile_keys


@triton.jit(do_not_specialize=["table_stride"])
def _paged_prefill_kernel(
    out_ptr,
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
    tokens: tl.constexpr,
    height: tl.constexpr,
    tile: tl.constexpr,
):
    # A program has a KV head and a piece of a chunk; its rows are (token, head of the group).
    kv_head = tl.program_id(0)
    if tl.program_id(1) >= tl.load(work_ptr):
        return
    tile_ptr = work_ptr + 2 * (1 + tl.program_id(1))
    sequence = tl.load(tile_ptr)
    first = tl.load(tile_ptr + 1)
    start = tl.load(query_starts_ptr + sequence)
    context = tl.load(context_lens_ptr + sequence)
    count = tl.load(query_starts_ptr + sequence + 1) - start
    dims = tl.arange(0, triton.next_power_of_2(dim))
    value_dims = tl.arange(0, triton.next_power_of_2(value_dim))
    token = tl.arange(0, height) // group
    head = kv_head * group + tl.arange(0, height) % group
    real = (token < tokens) & (first + token < count)
    row = (start + first + token).to(tl.int64)
    query_at = row * query_token_stride + head.to(tl.int64) * query_head_stride
    query = tl.load(query_ptr + query_at[:, None] + dims[None, :], mask=real[:, None] & (dims < dim)[None, :], other=0.0)
    if key_scales_ptr is not None:
        factor = factor * tl.load(key_scales_ptr + kv_head)
    top = tl.full((height,), float("-inf"), tl.float32)
    total = tl.zeros((height,), tl.float32)
    mixed = tl.zeros((height, value_dims.shape[0]), tl.float32)
    # Every query of the piece sees the keys from `begin` to `whole`, of those up to `end` some see some.
    position = context - count + first
    end = tl.minimum(position + tokens, context)
    if window > 0:
        begin = tl.maximum(position - window + 1, 0) // tile * tile
        whole = begin
    else:
        begin = 0
        whole = (position + 1) // tile * tile
    cells = tl.arange(0, tile)
    keys_ptr += kv_head * key_head_stride
    values_ptr += kv_head * value_head_stride
    table_ptr = tables_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_stride
    # The next tile's blocks are looked up while this one's keys are on their way: see `paged_decode`.
    blocks = tl.load(table_ptr + (begin + cells) // block_size, mask=begin + cells < end, other=0)
    for at in range(begin, whole, tile):
        next_key = at + tile + cells
        next_blocks = tl.load(table_ptr + next_key // block_size, mask=next_key < end, other=0)
        cell = (at + cells) % block_size
        keys = load_tile(keys_ptr, blocks, cell, None, key_block_stride, key_cell_stride, dim, False)
        values = load_tile(values_ptr, blocks, cell, None, value_block_stride, value_cell_stride, value_dim, False)
        scores = score_tile(query, keys, factor, cap, capped)
        top, total, mixed = add_tile(scores, values.to(query.dtype), top, total, mixed)
        blocks = next_blocks
    for at in range(whole, end, tile):
        next_key = at + tile + cells
        next_blocks = tl.load(table_ptr + next_key // block_size, mask=next_key < end, other=0)
        key = at + cells
        seen = key < end
        keys = load_tile(keys_ptr, blocks, key % block_size, seen, key_block_stride, key_cell_stride, dim, True)
        values = load_tile(values_ptr, blocks, key % block_size, seen, value_block_stride, value_cell_stride, value_dim, True)
        scores = score_tile(query, keys, factor, cap, capped)
        visible = key[None, :] <= (position + token)[:, None]
        if window > 0:
            visible = visible & (key[None, :] > (position + token - window)[:, None])
        top, total, mixed = add_tile(tl.where(visible, scores, float("-inf")), values.to(query.dtype), top, total, mixed)
        blocks = next_blocks
    if value_scales_ptr is not None:
        mixed *= tl.load(value_scales_ptr + kv_head)
    if sinks_ptr is not None:
        total, mixed = add_sink(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E, top, total, mixed)
    mixed /= tl.where(total == 0, 1.0, total)[:, None]
    out_at = (row * (kv_heads * group) + head)[:, None] * value_dim + value_dims[None, :]
    tl.store(out_ptr + out_at, mixed.to(out_ptr.dtype.element_ty), mask=real[:, None] & (value_dims < value_dim)[None, :])


def height(group: int, value_dim: int) -> int:
    """Rows of a program: as many as registers hold, and no less than the 64 from which on products are of the fast kind."""
    return max(128 if value_dim <= 256 else 64, int(triton.next_power_of_2(group)))


def stages(value_dim: int) -> int:
    """Tiles on their way at once, and the one computed with."""
    return 3 if value_dim <= 256 else 2


def tile_tokens(group: int, value_dim: int) -> int:
    """Tokens of a piece, for `prefill_work`: all heads of a group go together."""
    return height(group, value_dim) // group


def paged_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: Step,
    scoring: Scoring,
    *,
    work: torch.Tensor,
    tiles: int,
) -> None:
    """Attends from the tokens of longer chunks, as `paged_decode` from those of others.

    `work` int32 is what the core's `prefill_work` made for `tile_tokens`, and `tiles` an upper bound of the pieces in it. Others' rows
    of `out` are not touched.
    """
    kv_heads, block_size, dim = keys.shape[1:]
    group, value_dim = query.shape[1] // kv_heads, values.shape[-1]
    factor, cap = score_factors(scoring)
    _paged_prefill_kernel[(kv_heads, tiles)](
        out,
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
        value_dim=value_dim,
        block_size=block_size,
        window=scoring.window or 0,
        capped=bool(scoring.softcap),
        tokens=tile_tokens(group, value_dim),
        height=height(group, value_dim),
        tile=tile_keys(keys),
        num_warps=8,
        num_stages=stages(value_dim),
    )
