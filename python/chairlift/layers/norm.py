"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales each vector along the last axis to root mean square 1, then by `weight` (its last axis long)."""
    if x.is_cuda and x.is_contiguous():
        # Triton exists only where there is a GPU to use it.
        from chairlift.kernels import rms_norm as kernel

        return kernel.rms_norm(x, weight, eps)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
