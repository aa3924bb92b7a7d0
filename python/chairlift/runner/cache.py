"""The KV cache: how large it is, and its memory."""

from __future__ import annotations

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


class KvCache:
    """The keys and values of every layer, one tensor [layers, blocks, 2, kv_heads, block_size, head_dim].

    Its pages are not touched before they are used, so what the operating system counts grows with use.
    """

    def __init__(self, model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (model.num_layers, num_blocks, 2, model.num_kv_heads, block_size, model.head_dim)
        try:
            self.tensor = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            total = num_blocks * block_bytes(model, block_size, dtype)
            raise InvalidSetting(
                f"no memory for {num_blocks} KV blocks, {total / 2**30:.1f} GiB: lower --num-kv-blocks ({error})"
            ) from None

    def copy(self, pairs: np.ndarray) -> None:
        """Copies whole blocks, all layers: pairs [n, 2] of block numbers, from and to."""
        for source, target in pairs.tolist():
            self.tensor[:, target].copy_(self.tensor[:, source])
