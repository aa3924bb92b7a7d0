"""RMS normalisation, optionally fused with the addition to the residual stream."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales each vector of contiguous x, along the last axis, to root mean square 1, then by `weight`."""
    if x.is_cuda:
        # triton is only installed for GPUs.
        from chairlift.kernels import rms_norm as kernel

        return kernel.rms_norm(x, weight, eps)
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, inner: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds x to residual in place and returns the normalised sum. Both are contiguous and have the same shape.

    `inner` is the weight of a norm that is applied to x before the addition (Gemma 2).
    """
    if x.is_cuda:
        from chairlift.kernels import rms_norm as kernel  # as above

        return kernel.add_rms_norm(x, residual, weight, eps, inner=inner)
    residual.add_(x if inner is None else rms_norm(x, inner, eps))
    return rms_norm(residual, weight, eps)
