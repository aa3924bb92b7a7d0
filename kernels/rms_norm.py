"""RMS normalisation of rows on the GPU, optionally fused with the preceding addition to the residual stream."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg"

from __future__ import annotations

import torch
import triton.language as tl

from chairlift.kernels.cached_launch import jit


@jit()
def _rms_norm_kernel(out_ptr, x_ptr, weight_ptr, residual_ptr, inner_ptr, eps, columns, block: tl.constexpr):
    # One program normalises one whole row. Sums are in fp32 and in the same order for any number of rows.
    start = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, block)
    mask = offsets < columns
    # All loads come before the first sum, which needs the whole row.
    x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        if inner_ptr is not None:
            inner = tl.load(inner_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / columns + eps) * inner
        total = (residual + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + start + offsets, total, mask=mask)
        # The stored sum is normalised, so the result equals that of two separate operations.
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(out_ptr + start + offsets, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises contiguous x [..., columns] along its last axis and scales it by weight [columns]."""
    return _launch(x, weight, None, None, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, inner: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds x to residual in place and returns the normalised sum. Both are contiguous [..., columns].

    `inner` [columns] is the weight of a norm that is applied to x before the addition (Gemma 2).
    """
    return _launch(x, weight, residual, inner, eps)


def _launch(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, inner: torch.Tensor | None, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    columns = x.shape[-1]
    block = 1 << (columns - 1).bit_length()
    # A warp has 32 lanes with at least 8 values each.
    warps = min(max(block // 256, 1), 16)
    _rms_norm_kernel[(x.numel() // columns,)](out, x, weight, residual, inner, eps, columns, block=block, num_warps=warps)
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference in torch, for tests: computed in fp32 and rounded once at the end."""
    return _normalised(x.float(), weight, eps).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, inner: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference in torch, for tests. It also changes `residual`."""
    wide = x.float() if inner is None else _normalised(x.float(), inner, eps)
    residual.copy_(residual.float() + wide)
    return rms_norm_reference(residual, weight, eps)


def _normalised(wide: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
