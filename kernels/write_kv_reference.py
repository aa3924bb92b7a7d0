"""Reference of `write_kv` in torch: for tests, and for tensors on a CPU."""

from __future__ import annotations

import torch

from chairlift.kernels import LARGEST


def write_kv_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Stores k [T, kv_heads, D] and v [T, kv_heads, Dv] in one layer's cache at slots int32 [T]: block * block_size + offset, or -1.

    The cache is keys [blocks, kv_heads, block_size, D] and values [blocks, kv_heads, block_size, Dv]. A token with slot -1 is not stored.
    In a cache of float8_e4m3fn, numbers are divided by `scales`, fp32 [kv_heads] for keys and for values, and clamped to the dtype's range.
    """
    seen = slots >= 0
    block, offset = slots[seen] // keys.shape[2], slots[seen] % keys.shape[2]
    for new, cache, scale in ((k, keys, scales and scales[0]), (v, values, scales and scales[1])):
        kept = new[seen]
        if cache.dtype == torch.float8_e4m3fn:
            kept = (kept.float() if scale is None else kept.float() / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
        cache[block, :, offset] = kept.to(cache.dtype)
