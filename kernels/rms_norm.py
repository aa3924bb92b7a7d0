"""RMS normalisation of rows on the GPU, optionally fused with the preceding addition to the residual stream and with rounding to 8 bits."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg"

from __future__ import annotations

from typing import overload

import torch
import triton.language as tl

from chairlift.kernels import LARGEST
from chairlift.kernels.cached_launch import jit
from chairlift.kernels.quantise_rows import rounded_rows, store_rounded, whole_row


@jit()
def _rms_norm_kernel(
    out_ptr,
    scale_ptr,
    x_ptr,
    weight_ptr,
    residual_ptr,
    inner_ptr,
    eps,
    columns,
    least: tl.constexpr,
    largest: tl.constexpr,
    block: tl.constexpr,
):
    # One program normalises one whole row. Sums are in fp32 and in the same order for any number of rows.
    row = tl.program_id(0).to(tl.int64)
    start = row * columns
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
    # Rounded to the dtype of x first, so that 8 bits equal those of two separate operations.
    normalised = (x * scale * weight).to(x_ptr.dtype.element_ty)
    if scale_ptr is not None:
        store_rounded(out_ptr, scale_ptr, row, columns, offsets, normalised.to(tl.float32), least, largest)
    else:
        tl.store(out_ptr + start + offsets, normalised, mask=mask)


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, least: float) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, least: float | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalises contiguous x [..., columns] along its last axis and scales it by weight [columns].

    With `least`, returns what `quantise_rows` makes of the result.
    """
    return _launch(x, weight, None, None, eps, least)


@overload
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, inner: torch.Tensor | None = None
) -> torch.Tensor: ...
@overload
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, inner: torch.Tensor | None = None, least: float
) -> tuple[torch.Tensor, torch.Tensor]: ...
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    inner: torch.Tensor | None = None,
    least: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Adds x to residual in place and returns the normalised sum. Both are contiguous [..., columns].

    `inner` [columns] is the weight of a norm that is applied to x before the addition (Gemma 2).
    With `least`, returns what `quantise_rows` makes of the normalised sum.
    """
    return _launch(x, weight, residual, inner, eps, least)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, inner: torch.Tensor | None, eps: float, least: float | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    out, scale = (torch.empty_like(x), None) if least is None else rounded_rows(x, rows, columns)
    block, warps = whole_row(columns)
    given = (out, scale, x, weight, residual, inner, eps, columns)
    _rms_norm_kernel[(rows,)](*given, least=least, largest=LARGEST, block=block, num_warps=warps)
    return out if scale is None else (out, scale)


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
