"""The KV cache: how large it is, and its memory, on the device and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from chairlift.config import EngineConfig
from chairlift.errors import InvalidSetting
from chairlift.models.config import ModelConfig

DEFAULT_SHARE = 0.25
"""The part of available memory that the cache takes when nobody said how much."""
LARGEST_SHARE = 0.9
"""The part that it may take so that one sequence of full length fits."""

TIMED_BLOCKS, TIMED_ROUNDS = 8, 5
"""How many blocks are swapped at once to see how long it takes, and how many times."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How many blocks there are, block 0 (which holds nobody's tokens) included, and how long a sequence may get."""

    num_blocks: int
    max_model_len: int


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return model.num_layers * 2 * model.num_kv_heads * block_size * model.head_dim * dtype.itemsize


def fit_cache(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, available: int) -> CacheSize:
    """Sizes the cache for `available` bytes of memory, where the config leaves it open.

    A max_model_len that was asked for is kept or refused (InvalidSetting, with the numbers); one that was not is shortened to
    what fits.
    """
    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise InvalidSetting(f"--max-model-len {longest}: the model was made for {model.max_position_embeddings} positions")
    size, each = config.block_size, block_bytes(model, config.block_size, dtype)
    one = -(-longest // size)
    if config.num_kv_blocks is not None:
        blocks, source = config.num_kv_blocks - 1, f"--num-kv-blocks {config.num_kv_blocks} (one of them is scratch)"
    elif config.kv_cache_memory_bytes is not None:
        blocks, source = config.kv_cache_memory_bytes // each - 1, f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
    else:
        wanted = min(config.max_num_seqs * one, int(available * DEFAULT_SHARE) // each)
        blocks = min(max(wanted, one), int(available * LARGEST_SHARE) // each - 1)
        source = f"{available / 2**30:.1f} GiB of available memory"
    if blocks < 1:
        raise InvalidSetting(f"{source} does not hold two blocks of {size} tokens, one of them scratch: a block takes {each} bytes")
    if blocks < one:
        if config.max_model_len is not None:
            raise InvalidSetting(
                f"--max-model-len {longest} needs {one} blocks of {size} tokens ({one * each / 2**20:.0f} MiB), "
                f"but {source} gives {blocks}: at most {blocks * size} tokens fit"
            )
        longest = blocks * size
    return CacheSize(blocks + 1, longest)


def fit_host(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, available: int) -> int:
    """Blocks that preempted sequences may have in the host's memory, of which `available` bytes are free; raises InvalidSetting."""
    space, each = config.swap_space, block_bytes(model, config.block_size, dtype)
    if 0 < space < each:
        raise InvalidSetting(f"--swap-space {space} does not hold a block of {config.block_size} tokens, which takes {each} bytes")
    if space > available:
        raise InvalidSetting(f"--swap-space {space}: there are {available / 2**30:.1f} GiB of memory available")
    return space // each


class KvCache:
    """The keys and values of every layer, one tensor [layers, blocks, 2, kv_heads, block_size, head_dim].

    Beside it `host` [blocks, layers, 2, kv_heads, block_size, head_dim] keeps what was swapped out, each block in one piece so that
    it crosses in one transfer. On a CPU pages are not touched before they are used, so what the operating system counts grows with use.
    """

    def __init__(
        self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, host_blocks: int = 0
    ) -> None:
        block = (2, model.num_kv_heads, block_size, model.head_dim)
        each = block_bytes(model, block_size, dtype)
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

    def time_swap(self) -> int:
        """Nanoseconds that a block takes to the host or back, measured on blocks that nobody uses yet."""
        count = min(TIMED_BLOCKS, len(self.host), self.tensor.shape[1])
        pairs = [(block, block) for block in range(count)]
        times = []
        for _ in range(1 + TIMED_ROUNDS):
            began = time.perf_counter_ns()
            self.swap(pairs, pairs)
            if self.tensor.is_cuda:
                torch.cuda.synchronize(self.tensor.device)
            times.append(time.perf_counter_ns() - began)
        # The first round is the first to touch this memory.
        return max(1, round(statistics.median(times[1:]) / (2 * count)))
