"""Copies KV blocks within a cache on the GPU."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""4-byte words per program: 16 bytes for each lane of its 8 warps."""


@triton.jit(do_not_specialize=["count"])
def _copy_blocks_kernel(cache_ptr, pairs_ptr, count, words, block: tl.constexpr):
    # A program copies the same words of every pair, one pair after another, so a copied block can be the source of a later pair.
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < words
    for pair in range(count):
        # Offsets in the cache exceed 32 bits.
        source = tl.load(pairs_ptr + 2 * pair).to(tl.int64) * words
        target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64) * words
        tl.store(cache_ptr + target + offsets, tl.load(cache_ptr + source + offsets, mask=mask), mask=mask)
        # The next pair may read words that another lane has just written.
        tl.debug_barrier()


def copy_blocks(cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies whole blocks of a contiguous cache [blocks, numbers]. A block's bytes are a multiple of 4.

    `pairs` int32 [n, 2] on the device are block numbers, from and to. The result is that of copying them in order.
    """
    words = cache.view(torch.int32)
    size = words.shape[1]
    _copy_blocks_kernel[(triton.cdiv(size, BLOCK),)](words, pairs, len(pairs), size, block=BLOCK, num_warps=8)


def copy_blocks_reference(cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Reference in torch, for tests."""
    for source, target in pairs.tolist():
        cache[target].copy_(cache[source])
