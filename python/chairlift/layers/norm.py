"""Root-mean-square normalisation, alone or with the addition to the residual stream that comes before it."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales each vector of contiguous x, along the last axis, to root mean square 1, then by `weight` (its last axis long)."""
    if x.is_cuda:
        # Triton exists only where there is a GPU to use it.
        from chairlift.kernels import rms_norm as kernel

        return kernel.rms_norm(x, weight, eps)
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, inner: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds x to residual, in place, and returns the sum as `rms_norm` makes it; both contiguous and of the same shape.

    With `inner` x is itself normalised, and scaled by that, before it is added (Gemma 2).
    """
    if x.is_cuda:
        from chairlift.kernels import rms_norm as kernel  # as above

        return kernel.add_rms_norm(x, residual, weight, eps, inner=inner)
    residual.add_(x if inner is None else rms_norm(x, inner, eps))
    return rms_norm(residual, weight, eps)
