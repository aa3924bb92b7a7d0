"""The KV cache's memory, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig
from chairlift.runner.sizing import block_bytes


class KvCache:
    """The keys and values of every layer, one tensor [layers, blocks, 2, kv_heads, block_size, head_dim].

    Beside it `host` [blocks, layers, 2, kv_heads, block_size, head_dim] keeps what was swapped out, each block in one piece so that
    it crosses in one transfer. On a CPU pages are not touched before they are used, so what the operating system counts grows with use.
    """

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, host_blocks: int = 0
    ) -> None:
        block = (2, model.num_kv_heads, block_size, model.head_dim)
        each = block_bytes(model, block_size, str(dtype).removeprefix("torch."))
        try:
            self.tensor = torch.empty((model.num_layers, num_blocks, *block), dtype=dtype, device=device)
        except RuntimeError as error:
            raise InvalidSetting(
                f"no memory for {num_blocks} KV blocks, {num_blocks * each / 2**30:.1f} GiB: lower --num-kv-blocks ({error})"
            ) from None
        try:
            # Only from pinned memory are transfers to and from a device quick.
            self.host = torch.empty(
                (host_blocks, model.num_layers, *block), dtype=dtype, pin_memory=device.type == "cuda" and host_blocks > 0
            )
        except RuntimeError as error:
            raise InvalidSetting(
                f"no memory for {host_blocks} swapped KV blocks, {host_blocks * each / 2**30:.1f} GiB: lower --swap-space ({error})"
            ) from None

    def copy(self, pairs: np.ndarray) -> None:
        """Copies whole blocks, all layers: pairs [n, 2] of block numbers, from and to."""
        for source, target in pairs.tolist():
            self.tensor[:, target].copy_(self.tensor[:, source])

    def swap(self, outs: Iterable[tuple[int, int]], ins: Iterable[tuple[int, int]]) -> None:
        """Copies whole blocks to the host (device block, host block), and then back (host block, device block)."""
        # Block by block: gathering many with an index was measured at three to seven times as slow on a CPU, for 8 to 256 blocks.
        for block, host in outs:
            self.host[host].copy_(self.tensor[:, block], non_blocking=True)
        for host, block in ins:
            self.tensor[:, block].copy_(self.host[host], non_blocking=True)
