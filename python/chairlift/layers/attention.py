"""Paged attention: queries of a ragged token axis over keys and values that lie in blocks of a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Read:
    """What the queries of one sequence see in one step.

    `rows` are the cache's rows (see `as_rows`) that hold its keys, then its values, head by head and block by block. Of the
    tokens in them, `first` to `last` are seen; `mask` [queries, last - first], added to the scores, says by whom, and is None
    when there is but one query, or when the queries are the whole context (`causal`).
    """

    start: int
    end: int
    rows: torch.Tensor
    first: int
    last: int
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything about one step that attention needs, computed once and shared by all layers.

    `writes` [tokens * 2 * kv_heads] is where each token's keys and values go, as rows of head_dim; `reads` has, for each sliding
    window of the model (None: all of the context), one Read per sequence.
    """

    tokens: int
    writes: torch.Tensor
    reads: dict[int | None, list[Read]]


def plan_attention(
    slots: np.ndarray,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    *,
    kv_heads: int,
    block_size: int,
    windows: frozenset[int | None],
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Plans a step of S sequences: slots [T], query_starts [S + 1], context_lens [S] and block_tables [S, blocks], all int32.

    A slot is block * block_size + offset; sequence i owns the tokens query_starts[i] to query_starts[i + 1], and they are the
    last ones of its context.
    """
    parts = np.arange(2 * kv_heads, dtype=np.int64)
    block, offset = np.divmod(slots.astype(np.int64), block_size)
    writes = ((block[:, None] * (2 * kv_heads) + parts) * block_size + offset[:, None]).reshape(-1)
    tables = block_tables.astype(np.int64) * (2 * kv_heads)
    starts, lens = query_starts.tolist(), context_lens.tolist()
    reads: dict[int | None, list[Read]] = {window: [] for window in windows}
    for i, context in enumerate(lens):
        start, end = starts[i], starts[i + 1]
        position = context - (end - start)
        for window, found in reads.items():
            seen = 0 if window is None else max(0, position - window + 1)
            low = seen // block_size
            rows = (tables[i, low : -(-context // block_size)] + parts[:, None]).reshape(-1)
            # A window's mask is needed as soon as the first query's sight ends after what the last one still sees.
            causal = position == 0 and end - start > 1 and (window is None or context <= window)
            mask = None
            if end - start > 1 and not causal:
                mask = _mask(position, context, seen, window, dtype).to(device)
            base = low * block_size
            found.append(Read(start, end, torch.from_numpy(rows).to(device), seen - base, context - base, mask, causal))
    return AttentionPlan(len(slots), torch.from_numpy(writes).to(device), reads)


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
    cache.view(-1, head_dim).index_copy_(0, plan.writes, kv[: plan.tokens].reshape(-1, head_dim))


def paged_attention(query: torch.Tensor, cache: torch.Tensor, reads: list[Read]) -> torch.Tensor:
    """Attends from query [rows, heads, head_dim] to one layer's cache, which holds this step's keys and values already.

    Returns [rows, heads * head_dim], zero for rows that belong to no sequence (padding). Each sequence is computed by calls that
    see nothing of the others: its result does not depend on who shares the step.
    """
    rows, heads, head_dim = query.shape
    _, _, kv_heads, block_size, _ = cache.shape
    group = heads // kv_heads
    blocks = cache.view(-1, block_size * head_dim)
    single = query.view(rows, 1, kv_heads, group, head_dim).unbind(0)
    outputs = []
    for read in reads:
        keys, values = blocks.index_select(0, read.rows).view(2, 1, kv_heads, -1, head_dim)[:, :, :, read.first : read.last].unbind(0)
        if read.end - read.start == 1:
            # The heads of a group share keys and values: they go in as the rows of one query matrix.
            outputs.append(functional.scaled_dot_product_attention(single[read.start], keys, values).view(1, -1))
            continue
        span = query[read.start : read.end].view(-1, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        shape = (kv_heads, group, keys.shape[2], head_dim)
        output = functional.scaled_dot_product_attention(
            span,
            keys.transpose(0, 1).expand(shape),
            values.transpose(0, 1).expand(shape),
            attn_mask=read.mask,
            is_causal=read.causal,
        )
        outputs.append(output.permute(2, 0, 1, 3).reshape(-1, heads * head_dim))
    tokens = reads[-1].end
    if tokens < rows:
        outputs.append(query.new_zeros(rows - tokens, heads * head_dim))
    return torch.cat(outputs)
