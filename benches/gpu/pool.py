"""A KV cache of the shape of Llama-3.1-8B, and steps of attention over it, for scripts that time them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import common
import numpy as np

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKEN_BYTES = 2 * KV_HEADS * DIM
"""Of a token's keys and values in one layer, times the bytes of a number."""


class Pool:
    """A cache of a few layers, which calls go through in turn, as a model's do; its strides decide what is compiled."""

    def __init__(self, run: common.Run, tokens: int, layers: int, block_size: int, dtype: Any) -> None:
        import torch

        from chairlift.models.shape import KvSpec
        from chairlift.runner.memory.kv_cache import KvCache

        self.run, self.block_size = run, block_size
        spec = KvSpec(KV_HEADS, DIM, DIM, None)
        self.cache = KvCache([spec] * layers, tokens // block_size + 2, block_size, dtype, torch.device(run.device))
        # Zeros would be quicker to read for some memories; the bits of small numbers in each form are good for all.
        self.cache.tensor.view(torch.uint8).random_(0, 48)

    def plans(self, lengths: list[tuple[int, int]]) -> list[Any]:
        """Steps of (queries, context), enough for all layers together to be cold."""
        import torch

        from chairlift.layers.device_attention import DevicePlan, splits_at_once

        queries, contexts = (np.array(part, dtype=np.int32) for part in zip(*lengths, strict=True))
        widths = -(-contexts // self.block_size)
        size = float(contexts.sum()) * TOKEN_BYTES * self.cache.tensor.element_size() * len(self.cache.layers)
        there, device = len(self.cache.tensor) - 1, torch.device(self.run.device)
        made = []
        for seed in range(min(common.copies(self.run, size), max(1, there // int(widths.sum())))):
            order = np.random.default_rng(seed).permutation(there) + 1
            tables = np.zeros((len(lengths), int(widths.max())), dtype=np.int32)
            for row, used, end in zip(tables, widths, widths.cumsum(), strict=True):
                row[:used] = order[end - used : end]
            starts = np.concatenate(([0], queries.cumsum())).astype(np.int32)
            slots = np.zeros(int(queries.sum()), dtype=np.int32)
            arrays = slots, starts, contexts, tables
            made.append(DevicePlan.send(*arrays, windows=[None], device=device, at_once=splits_at_once(KV_HEADS, device)))
        return made

    def calls(self, lengths: list[tuple[int, int]], query: Any) -> list[Callable[[], object]]:
        """Attention of all layers over all plans."""
        from chairlift.layers.attention import paged_attention

        scales = None
        if self.cache.tensor.element_size() == 1:
            scales = (query.new_ones(KV_HEADS).float(), query.new_ones(KV_HEADS).float())
        return [
            lambda plan=plan, layer=layer: paged_attention(query, *layer, plan, scales=scales)
            for plan in self.plans(lengths)
            for layer in self.cache.layers
        ]

    def in_one_piece(self, batch: int, context: int) -> list[tuple[Any, Any]]:
        """The pool's memory as contiguous keys and values [batch, kv_heads, context, D], as often as needed to be cold."""
        flat, size = self.cache.tensor.view(-1), batch * context * TOKEN_BYTES // 2
        count = min(common.copies(self.run, 2 * size * self.cache.tensor.element_size()), len(flat) // (2 * size))
        parts = flat[: count * 2 * size].view(count, 2, batch, KV_HEADS, context, DIM)
        return [(part[0], part[1]) for part in parts]
