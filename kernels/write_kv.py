"""Stores a step's keys and values in a paged cache on the GPU. On CPUs `write_kv_reference` does this."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chairlift.kernels import LARGEST

_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def store_heads(
    cache_ptr, x, scale_ptr, slot, head, dim, mask, heads: tl.constexpr, block_stride, head_stride, offset_stride, block_size: tl.constexpr
):
    """Stores x [heads, dims] of a token in its slot, unless the slot is -1.

    `head` is a column of head indices, `dim` a row of dimension indices, and `mask` covers both. In an 8-bit cache x is divided by its
    head's scale and clamped.
    """
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        if scale_ptr is not None:
            x = x / tl.load(scale_ptr + head, mask=head < heads, other=1.0)
        x = tl.clamp(x, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    # Offsets in the cache exceed 32 bits.
    start = (slot // block_size).to(tl.int64) * block_stride + (slot % block_size) * offset_stride
    if slot >= 0:
        tl.store(cache_ptr + start + head * head_stride + dim, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slots_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    keys_block,
    keys_head,
    keys_offset,
    values_block,
    values_head,
    values_offset,
    heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_size: tl.constexpr,
    head_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)[:, None]
    dim = tl.arange(0, dim_block)[None, :]
    mask = (head < heads) & (dim < key_dim)
    k = tl.load(k_ptr + token * k_token + head * k_head + dim, mask=mask, other=0.0).to(tl.float32)
    store_heads(keys_ptr, k, key_scale_ptr, slot, head, dim, mask, heads, keys_block, keys_head, keys_offset, block_size)
    mask = (head < heads) & (dim < value_dim)
    v = tl.load(v_ptr + token * v_token + head * v_head + dim, mask=mask, other=0.0).to(tl.float32)
    store_heads(values_ptr, v, value_scale_ptr, slot, head, dim, mask, heads, values_block, values_head, values_offset, block_size)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Stores k [T, kv_heads, D] and v [T, kv_heads, Dv] in one layer's cache at slots int32 [T]: block * block_size + offset, or -1.

    The cache is keys [blocks, kv_heads, block_size, D] and values [blocks, kv_heads, block_size, Dv]. All tensors may have any strides, but
    must be contiguous along the last axis. A token with slot -1 is not stored. In a cache of float8_e4m3fn, numbers are divided by
    `scales`, fp32 [kv_heads] for keys and for values, and clamped to the dtype's range.
    """
    tokens, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    dim_block = triton.next_power_of_2(max(key_dim, value_dim))
    # 1024 numbers per program: 8 per lane, which are 16 bytes in half precision.
    head_block = min(max(1024 // dim_block, 1), triton.next_power_of_2(heads))
    _write_kv_kernel[(tokens, triton.cdiv(heads, head_block))](
        k,
        v,
        keys,
        values,
        *(scales or (None, None)),
        slots,
        *k.stride()[:2],
        *v.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=keys.shape[2],
        head_block=head_block,
        dim_block=dim_block,
        num_warps=4,
    )
