"""Copies of KV blocks within a cache, on the GPU."""

# Triton has no types: mypy checks the launchers alone.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Words of 4 bytes a program: 16 bytes for each lane of its 8 warps."""


@triton.jit(do_not_specialize=["count"])
def _copy_blocks_kernel(cache_ptr, pairs_ptr, count, words, block: tl.constexpr):
    # A program copies the same words of every pair, one pair after the other, so a block that was copied to can be copied from.
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < words
    for pair in range(count):
        # A cache has more words than 32 bits count.
        source = tl.load(pairs_ptr + 2 * pair).to(tl.int64) * words
        target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64) * words
        tl.store(cache_ptr + target + offsets, tl.load(cache_ptr + source + offsets, mask=mask), mask=mask)
        # The next pair may read what another lane has just written.
        tl.debug_barrier()


def copy_blocks(cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies whole blocks of a contiguous cache [blocks, numbers]; a block's bytes are a multiple of 4.

    `pairs` int32 [n, 2], on the device, are block numbers, from and to; the copies happen as if in their order.
    """
    words = cache.view(torch.int32)
    size = words.shape[1]
    _copy_blocks_kernel[(triton.cdiv(size, BLOCK),)](words, pairs, len(pairs), size, block=BLOCK, num_warps=8)


def copy_blocks_reference(cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """The same in torch, for tests."""
    for source, target in pairs.tolist():
        cache[target].copy_(cache[source])
