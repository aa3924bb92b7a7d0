"""Paged attention: queries of a ragged token axis over keys and values that lie in blocks of a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Read:
    """What the queries of one sequence, `start` to `end` on the token axis, see in one step.

    `rows` are the rows of a cache (of block_size * head_dim numbers) with its keys, then its values, head by head and block by
    block. They are gathered into `gathered`, scratch memory that all reads share, of which `keys` and `values` are views in the
    shape that the product wants, without what nobody sees. `mask` [queries, keys] is added to the scores; it is None for a
    single query, and for queries that are the whole context (`causal`).
    """

    start: int
    end: int
    rows: torch.Tensor
    gathered: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything about one step that attention needs, computed once and shared by all layers.

    `writes` [tokens * 2 * kv_heads] is where each token's keys and values go, as rows of head_dim; `reads` has, for each sliding
    window of the model (None: all of the context), one Read per sequence.
    """

    writes: torch.Tensor
    reads: dict[int | None, list[Read]]


def plan_attention(
    slots: np.ndarray,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    *,
    heads: int,
    windows: frozenset[int | None],
    cache: torch.Tensor,
) -> AttentionPlan:
    """Plans a step of S sequences: slots [T], query_starts [S + 1], context_lens [S] and block_tables [S, blocks], all int32.

    A slot is block * block_size + offset; sequence i owns the tokens query_starts[i] to query_starts[i + 1], and they are the
    last ones of its context. `cache` is any one layer's (see write_kv); `heads` counts the query heads.
    """
    _, _, kv_heads, size, head_dim = cache.shape
    parts = np.arange(2 * kv_heads, dtype=np.int64)
    block, offset = np.divmod(slots.astype(np.int64), size)
    writes = ((block[:, None] * (2 * kv_heads) + parts) * size + offset[:, None]).reshape(-1)
    tables = block_tables.astype(np.int64) * (2 * kv_heads)
    starts, lens = query_starts.tolist(), context_lens.tolist()
    scratch = cache.new_empty(-(-max(lens) // size) * 2 * kv_heads, size * head_dim)
    reads: dict[int | None, list[Read]] = {window: [] for window in windows}
    for start, end, context, table in zip(starts, starts[1:], lens, tables, strict=False):
        count, position = end - start, context - (end - start)
        for window, found in reads.items():
            seen = 0 if window is None else max(0, position - window + 1)
            low = seen // size
            rows = (table[low : -(-context // size)] + parts[:, None]).reshape(-1)
            gathered = scratch[: len(rows)]
            kv = gathered.view(2, kv_heads, 1, -1, head_dim)[:, :, :, seen - low * size : context - low * size]
            # The heads of a group share keys and values. A single query's heads go in as the rows of one matrix; several
            # queries' go in as heads of their own, of which the keys and values are repeated without a copy.
            kv = kv.transpose(1, 2) if count == 1 else kv.expand(-1, -1, heads // kv_heads, -1, -1)
            causal = position == 0 and count > 1 and (window is None or context <= window)
            mask = None if count == 1 or causal else _mask(position, context, seen, window, cache.dtype).to(cache.device)
            found.append(Read(start, end, torch.from_numpy(rows).to(cache.device), gathered, kv[0], kv[1], mask, causal))
    return AttentionPlan(torch.from_numpy(writes).to(cache.device), reads)


def _mask(position: int, context: int, seen: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Zero where the query at `position`, `position` + 1 ... sees the key at `seen`, `seen` + 1 ..., else minus infinity."""
    queries = torch.arange(position, context).unsqueeze(1)
    keys = torch.arange(seen, context)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def write_kv(kv: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan) -> None:
    """Stores the keys, then values, [tokens, 2 * kv_heads, head_dim] of a step in one layer's cache.

    The cache is [blocks, 2, kv_heads, block_size, head_dim] and contiguous: `cache[:, 0]` and `cache[:, 1]` are the keys and the
    values, [blocks, kv_heads, block_size, head_dim] each.
    """
    head_dim = cache.shape[-1]
    cache.view(-1, head_dim).index_copy_(0, plan.writes, kv.reshape(-1, head_dim))


def paged_attention(query: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, window: int | None) -> torch.Tensor:
    """Attends from query [rows, heads, head_dim] to one layer's cache, which holds this step's keys and values already.

    Returns [rows, heads * head_dim].
    """
    rows, heads, head_dim = query.shape
    _, _, kv_heads, size, _ = cache.shape
    blocks = cache.view(-1, size * head_dim)
    queries = query.view(rows, 1, kv_heads, heads // kv_heads, head_dim)
    single = queries.unbind(0)
    outputs = []
    for read in plan.reads[window]:
        torch.index_select(blocks, 0, read.rows, out=read.gathered)
        if read.end - read.start == 1:
            outputs.append(functional.scaled_dot_product_attention(single[read.start], read.keys, read.values).view(1, -1))
            continue
        span = queries[read.start : read.end].squeeze(1).permute(1, 2, 0, 3)
        output = functional.scaled_dot_product_attention(span, read.keys, read.values, attn_mask=read.mask, is_causal=read.causal)
        outputs.append(output.permute(2, 0, 1, 3).reshape(-1, heads * head_dim))
    return torch.cat(outputs)
