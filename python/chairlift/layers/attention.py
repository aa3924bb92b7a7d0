"""Paged attention over a ragged token axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from chairlift.kernels.write_kv_reference import write_kv_reference
from chairlift.layers.device_attention import DevicePlan

Scales = tuple[torch.Tensor, torch.Tensor]
"""Scales of 8-bit keys and values, fp32 [kv_heads] each."""


@dataclass(frozen=True, slots=True)
class SequenceRead:
    """The keys that one sequence's queries, `start` to `end` on the token axis, read in one step with one sliding window.

    `blocks` are the KV blocks with these keys, in order, and `keys` is the range of the keys in them. `visible` [queries, keys] is the
    mask; it is None for a single query, which sees all keys, and for a whole context (`causal`).
    """

    start: int
    end: int
    blocks: torch.Tensor
    keys: slice
    visible: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The attention metadata of one step for torch, shared by all layers.

    `slots` int32 [T] is the slot mapping. `reads` has one SequenceRead per sequence for each sliding window of the model (None: the
    whole context).
    """

    slots: torch.Tensor
    reads: dict[int | None, list[SequenceRead]]


AttentionPlan = TorchPlan | DevicePlan
"""The attention metadata of one step, for torch on a CPU or for the kernels on a GPU."""


def plan_attention(
    slots: np.ndarray,
    query_starts: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    *,
    windows: frozenset[int | None],
    block_size: int,
    device: torch.device,
) -> AttentionPlan:
    """Plans a step of S sequences: slots [T], query_starts [S + 1], context_lens [S] and block_tables [S, blocks], all int32.

    A slot is block * block_size + offset, or -1 for a padding token. Sequence i has the tokens query_starts[i] to query_starts[i + 1],
    the last ones of its context. A query sees itself and the tokens before it, at most `window` tokens in a layer with a window.
    """
    if device.type == "cuda":
        used = -(-int(context_lens.max(initial=1)) // block_size)
        return DevicePlan.send(slots, query_starts, context_lens, block_tables[:, :used], windows=windows, device=device)
    tables = torch.from_numpy(block_tables.astype(np.int64))
    starts, lens = query_starts.tolist(), context_lens.tolist()
    reads: dict[int | None, list[SequenceRead]] = {window: [] for window in windows}
    for start, end, context, table in zip(starts, starts[1:], lens, tables, strict=False):
        count, position = end - start, context - (end - start)
        for window, sequence_reads in reads.items():
            seen = 0 if window is None else max(0, position - window + 1)
            first = seen // block_size
            blocks = table[first : -(-context // block_size)]
            keys = slice(seen - first * block_size, context - first * block_size)
            causal = position == 0 and count > 1 and (window is None or context <= window)
            visible = None if count == 1 or causal else _visible(position, context, seen, window)
            sequence_reads.append(SequenceRead(start, end, blocks, keys, visible, causal))
    return TorchPlan(torch.tensor(slots), reads)


def _visible(position: int, context: int, seen: int, window: int | None) -> torch.Tensor:
    """The mask of queries from `position` on and keys from `seen` on, up to `context`."""
    queries = torch.arange(position, context).unsqueeze(1)
    keys = torch.arange(seen, context)
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan, *, scales: Scales | None = None
) -> None:
    """Stores k [T, kv_heads, D] and v [T, kv_heads, Dv] of a step in one layer's cache.

    The cache is keys [blocks, kv_heads, block_size, D] and values [blocks, kv_heads, block_size, Dv], contiguous along the last axis.
    In an 8-bit cache (float8_e4m3fn) numbers are divided by their head's scale and clamped.
    """
    if isinstance(plan, DevicePlan):
        plan.write(k, v, keys, values, scales)
        return
    write_kv_reference(k, v, keys, values, plan.slots, scales)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Attends from query [T, heads, D] to one layer's cache (see `write_kv`), which already holds this step's keys and values.

    `window` is one of the plan's. Scores are q·k * `scale` (1 / sqrt(D) if None), then, with a `softcap` c, c * tanh(score / c)
    (Gemma 2). `sinks` [heads] are the scores of a key that every query sees and that has no value (gpt-oss). Returns [T, heads, Dv];
    the rows of padding tokens are undefined.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(plan, DevicePlan):
        return plan.attend(query, keys, values, window=window, scale=scale, softcap=softcap, sinks=sinks, scales=scales)
    out = query.new_zeros(*query.shape[:2], values.shape[-1])
    for read in plan.reads[window]:
        span, seen = query[read.start : read.end], out[read.start : read.end]
        k = _gather(keys, read, scales and scales[0], query.dtype)
        v = _gather(values, read, scales and scales[1], query.dtype)
        if softcap or sinks is not None:
            seen.copy_(_attend(span, k, v, read, scale, softcap, sinks))
        elif len(span) == 1:
            # The heads of a group share keys and values, so a single query's heads are the rows of one matrix.
            rows = span.reshape(len(k), -1, span.shape[-1])
            seen.copy_(functional.scaled_dot_product_attention(rows, k, v, scale=scale).view_as(seen))
        else:
            # For several queries, each query head is a separate head; keys and values are expanded to the heads without a copy.
            heads = span.reshape(len(span), len(k), -1, span.shape[-1]).permute(1, 2, 0, 3)
            k, v = (part.unsqueeze(1).expand(-1, heads.shape[1], -1, -1) for part in (k, v))
            mixed = functional.scaled_dot_product_attention(heads, k, v, read.visible, is_causal=read.causal, scale=scale)
            seen.copy_(mixed.permute(2, 0, 1, 3).reshape_as(seen))
    return out


def _gather(cache: torch.Tensor, read: SequenceRead, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns the keys or values of a read: [kv_heads, keys, head_dim]."""
    seen = cache.index_select(0, read.blocks).transpose(0, 1).flatten(1, 2)[:, read.keys]
    if cache.dtype == dtype:
        return seen
    return (seen.float() if scale is None else seen.float() * scale[:, None, None]).to(dtype)


def _attend(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: SequenceRead,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention step by step in fp32, for options that torch's own attention lacks. k and v are as gathered."""
    count, heads, dim = query.shape
    scores = query.reshape(count, len(k), -1, dim).permute(1, 2, 0, 3).float() @ k.float().unsqueeze(1).mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = read.visible
    if read.causal:
        visible = torch.ones(count, count, dtype=torch.bool, device=scores.device).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(len(k), -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v.float().unsqueeze(1)).permute(2, 0, 1, 3).reshape(count, heads, -1).to(query.dtype)
