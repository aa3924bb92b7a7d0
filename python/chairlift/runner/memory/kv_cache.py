"""The memory of the KV cache on the device and on the host."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from chairlift.errors import InvalidSetting
from chairlift.models.shape import KvSpec

log = logging.getLogger("chairlift")

PAIRS = 256
"""Rows per kernel launch when rows are copied on a device."""


class KvCache:
    """The keys and values of all layers in one tensor [blocks, numbers]. A block of all layers is one row and moves in one copy.

    `layers` are views of it: for each layer keys [blocks, kv_heads, block_size, head_dim] and values [blocks, kv_heads, block_size,
    value_dim]. `host` [blocks, numbers] holds swapped-out blocks. On a CPU, pages are only resident once they are used.
    """

    def __init__(
        self, specs: Sequence[KvSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, host_blocks: int = 0
    ) -> None:
        self.block_size = block_size
        # Keys and values of one layer are adjacent.
        parts = [(spec.kv_heads, block_size, dim) for spec in specs for dim in (spec.head_dim, spec.value_dim)]
        sizes = [heads * size * dim for heads, size, dim in parts]
        each = sum(sizes) * dtype.itemsize
        try:
            self.tensor = torch.empty((num_blocks, sum(sizes)), dtype=dtype, device=device)
            self._copies = RowCopies(self.tensor)
        except RuntimeError as error:
            raise InvalidSetting(
                f"no memory for {num_blocks} KV blocks, {num_blocks * each / 2**30:.1f} GiB: lower --num-kv-blocks, or "
                f"--gpu-memory-utilization ({error})"
            ) from None
        views = [piece.view(num_blocks, *part) for piece, part in zip(self.tensor.split_with_sizes(sizes, 1), parts, strict=True)]
        self.layers = list(zip(views[::2], views[1::2], strict=True))
        try:
            self.host = host_pool(host_blocks, sum(sizes), dtype, pinned=device.type == "cuda" and host_blocks > 0)
        except RuntimeError as error:
            raise InvalidSetting(
                f"no memory for {host_blocks} swapped KV blocks, {host_blocks * each / 2**30:.1f} GiB: lower --swap-space ({error})"
            ) from None

    def copy(self, pairs: np.ndarray) -> None:
        """Copies blocks of all layers, in order: pairs [n, 2] of block numbers, from and to."""
        self._copies.run(pairs)

    def swap(self, outs: Iterable[tuple[int, int]], ins: Iterable[tuple[int, int]]) -> None:
        """Copies blocks to the host (device block, host block), then back (host block, device block)."""
        # Block by block: an indexed copy is three to seven times slower on a CPU, for 8 to 256 blocks.
        for block, host in outs:
            self.host[host].copy_(self.tensor[block], non_blocking=True)
        for host, block in ins:
            self.tensor[block].copy_(self.host[host], non_blocking=True)


class RowCopies:
    """Copies rows within a tensor [rows, numbers].

    A copy allocates no memory, so it cannot fail and is never repeated.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._pairs = torch.empty((PAIRS, 2), dtype=torch.int32, device=tensor.device)

    def run(self, pairs: np.ndarray) -> None:
        """Copies rows in order: pairs [n, 2] of row numbers, from and to."""
        if self._tensor.is_cuda:
            from chairlift.kernels.copy_blocks import copy_blocks  # imports triton, which is only installed for GPUs

            for start in range(0, len(pairs), PAIRS):
                some = torch.from_numpy(pairs[start : start + PAIRS])
                copy_blocks(self._tensor, self._pairs[: len(some)].copy_(some, non_blocking=True))
            return
        for source, target in pairs.tolist():
            self._tensor[target].copy_(self._tensor[source])


def host_pool(blocks: int, numbers: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Allocates host memory [blocks, numbers], page-locked for fast transfers if `pinned`.

    If the system refuses to lock that much, the memory is pageable and a warning is logged.
    """
    pool = torch.empty((blocks, numbers), dtype=dtype)
    if pinned:
        # Not torch's pinned allocator, which rounds sizes up to powers of two.
        driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(driver.cudaHostRegister(pool.data_ptr(), pool.nbytes, 0))
        if status == 0:
            weakref.finalize(pool, driver.cudaHostUnregister, pool.data_ptr())
        else:
            log.warning("swapping will be slow: cannot page-lock %.1f GiB (CUDA error %d); lower --swap-space", pool.nbytes / 2**30, status)
    return pool
