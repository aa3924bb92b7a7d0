"""Normalises and rotates the heads of a layer's queries and keys and stores keys and values in the cache, in one pass on the GPU."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.write_kv import store_heads
from chairlift.kernels.write_kv_reference import write_kv_reference


@triton.jit
def _turned(low, high, norm_ptr, eps, cosines, sines, pair, pairs, half: tl.constexpr, rotated_first: tl.constexpr):
    """Returns both halves of heads, [heads, pairs] each, rotated, and normalised before or after it if there is a norm."""
    if rotated_first:
        low, high = low * cosines - high * sines, high * cosines + low * sines
    if norm_ptr is not None:
        low_norm = tl.load(norm_ptr + pair, mask=pairs, other=0.0).to(tl.float32)
        high_norm = tl.load(norm_ptr + half + pair, mask=pairs, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * half) + eps)[:, None]
        low, high = low * scale * low_norm, high * scale * high_norm
    if not rotated_first:
        low, high = low * cosines - high * sines, high * cosines + low * sines
    return low, high


@triton.jit
def _store(
    cache_ptr, low, high, scale_ptr, slot, head, pair, mask, heads, half, block_stride, head_stride, offset_stride, block_size: tl.constexpr
):
    """Stores both halves of a token's heads (see `store_heads`)."""
    store_heads(cache_ptr, low, scale_ptr, slot, head, pair, mask, heads, block_stride, head_stride, offset_stride, block_size)
    store_heads(cache_ptr, high, scale_ptr, slot, head, half + pair, mask, heads, block_stride, head_stride, offset_stride, block_size)


@jit()
def _rope_write_kernel(
    qkv_ptr,
    cosines_ptr,
    sines_ptr,
    query_norm_ptr,
    key_norm_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slots_ptr,
    eps,
    qkv_token,
    keys_block,
    keys_head,
    keys_offset,
    values_block,
    values_head,
    values_offset,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    block_size: tl.constexpr,
    head_block: tl.constexpr,
    pair_block: tl.constexpr,
    rotated_first: tl.constexpr,
):
    # A program has some heads of one token, all queries, all keys or all values. The programs of queries come first, then keys, then
    # values.
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (heads + head_block - 1) // head_block
    kv_parts: tl.constexpr = (kv_heads + head_block - 1) // head_block
    # Broadcast before the load: each lane loads the elements of a vector that it needs for all heads, and no lane waits for another.
    pair = tl.broadcast_to(tl.arange(0, pair_block)[None, :], (head_block, pair_block))
    pairs = pair < half
    cosines = tl.load(cosines_ptr + token * half + pair, mask=pairs, other=0.0)
    sines = tl.load(sines_ptr + token * half + pair, mask=pairs, other=0.0)
    if part < query_parts:
        head = part * head_block + tl.arange(0, head_block)[:, None]
        mask = (head < heads) & pairs
        places = qkv_ptr + token * qkv_token + head * (2 * half) + pair
        low = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(places + half, mask=mask, other=0.0).to(tl.float32)
        low, high = _turned(low, high, query_norm_ptr, eps, cosines, sines, pair, pairs, half, rotated_first)
        tl.store(places, low.to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(places + half, high.to(qkv_ptr.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots_ptr + token)
        is_key = part < query_parts + kv_parts
        head = (part - query_parts) % kv_parts * head_block + tl.arange(0, head_block)[:, None]
        mask = (head < kv_heads) & pairs
        first = heads if is_key else heads + kv_heads
        places = qkv_ptr + token * qkv_token + (first + head) * (2 * half) + pair
        low = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(places + half, mask=mask, other=0.0).to(tl.float32)
        if is_key:
            low, high = _turned(low, high, key_norm_ptr, eps, cosines, sines, pair, pairs, half, rotated_first)
            _store(
                keys_ptr, low, high, key_scale_ptr, slot, head, pair, mask, kv_heads, half, keys_block, keys_head, keys_offset, block_size
            )
        else:
            _store(
                values_ptr,
                low,
                high,
                value_scale_ptr,
                slot,
                head,
                pair,
                mask,
                kv_heads,
                half,
                values_block,
                values_head,
                values_offset,
                block_size,
            )


def rope_write(
    qkv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    rotated_first: bool = False,
    eps: float = 0.0,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Rotates the queries and keys of qkv [T, heads + 2 * kv_heads, D], stores keys and values, and returns the queries [T, heads, D].

    `cosines` and `sines` fp32 [T, D / 2] rotate the pairs (i, i + D / 2). `norms`, [D] for queries and keys, apply an RMS norm to each head
    first (Qwen3), or after its rotation if it is `rotated_first` (Hunyuan). qkv may be strided along its tokens; its queries are rotated in
    place. `keys`, `values`, `slots` and `scales` are as in `write_kv`, with D columns for both keys and values. For a token with slot -1
    only the queries are rotated.
    """
    tokens, all_heads, dim = qkv.shape
    kv_heads = keys.shape[1]
    heads, half = all_heads - 2 * kv_heads, dim // 2
    pair_block = 1 << (half - 1).bit_length()
    # 512 pairs per program: 8 per lane of its 2 warps, which are twice 16 bytes in half precision.
    head_block = min(max(512 // pair_block, 1), 1 << (heads - 1).bit_length())
    grid = (tokens, -(-heads // head_block) + 2 * -(-kv_heads // head_block))
    _rope_write_kernel[grid](
        qkv,
        cosines,
        sines,
        *(norms or (None, None)),
        keys,
        values,
        *(scales or (None, None)),
        slots,
        eps,
        qkv.stride(0),
        *keys.stride()[:3],
        *values.stride()[:3],
        heads=heads,
        kv_heads=kv_heads,
        half=half,
        block_size=keys.shape[2],
        head_block=head_block,
        pair_block=pair_block,
        rotated_first=rotated_first,
        num_warps=2,
    )
    return qkv[:, :heads]


def rope_write_reference(
    qkv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    rotated_first: bool = False,
    eps: float = 0.0,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Reference in torch, for tests: computed in fp32 until numbers are stored."""
    kv_heads = keys.shape[1]
    heads = qkv.shape[1] - 2 * kv_heads
    turned = []
    for part, norm in zip((qkv[:, :heads], qkv[:, heads : heads + kv_heads]), norms or (None, None), strict=True):
        wide = part.float()
        if rotated_first:
            wide = _rotated(wide, cosines, sines)
        if norm is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()
        turned.append(wide if rotated_first else _rotated(wide, cosines, sines))
    qkv[:, :heads] = turned[0].to(qkv.dtype)
    write_kv_reference(turned[1], qkv[:, heads + kv_heads :], keys, values, slots, scales)
    return qkv[:, :heads]


def _rotated(wide: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    low, high = wide.chunk(2, -1)
    cos, sin = cosines.unsqueeze(1), sines.unsqueeze(1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
