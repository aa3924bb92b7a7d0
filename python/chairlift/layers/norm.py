"""Normalisation, optionally fused with the addition to the residual stream and with rounding to fp8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch.nn import functional

from chairlift.layers.linear import MIN_ABSMAX, Activations, Rounded, round_rows


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the residual stream. If it is `centred`, it shifts numbers to mean 0 first, and may have a bias."""

    weight: torch.Tensor
    eps: float
    centred: bool = False
    bias: torch.Tensor | None = None


def normalise(x: torch.Tensor, norm: Norm | None, *, rounds: bool = False) -> Activations:
    """Returns normalised x [..., columns]: x itself if there is no norm. `rounds` rounds the result, as `round_rows` does."""
    if norm is not None and not norm.centred:
        return rms_norm(x, norm.weight, norm.eps, rounds=rounds)
    result = x if norm is None else _layer_norm(x, norm)
    return round_rows(result) if rounds else result


def add_normalise(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, *, inner: Norm | None = None, rounds: bool = False
) -> Activations:
    """Adds x to residual in place and returns the normalised sum (see `normalise`). `inner` is a norm of x before the addition."""
    if norm is not None and not norm.centred:
        return add_rms_norm(x, residual, norm.weight, norm.eps, inner=None if inner is None else inner.weight, rounds=rounds)
    residual.add_(x if inner is None else rms_norm(x, inner.weight, inner.eps))
    return normalise(residual, norm, rounds=rounds)


def _layer_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    bias = None if norm.bias is None else norm.bias.float()
    return functional.layer_norm(x.float(), (x.shape[-1],), norm.weight.float(), bias, norm.eps).to(x.dtype)


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, rounds: Literal[False] = False) -> torch.Tensor: ...
@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, rounds: bool) -> Activations: ...
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, rounds: bool = False) -> Activations:
    """Scales each vector of contiguous x, along the last axis, to root mean square 1, then by `weight`.

    `rounds` rounds the result, as `round_rows` does.
    """
    if x.is_cuda:
        # triton is only installed for GPUs.
        from chairlift.kernels import rms_norm as kernel

        if rounds:
            return Rounded(*kernel.rms_norm(x, weight, eps, least=MIN_ABSMAX), x.dtype)
        return kernel.rms_norm(x, weight, eps)
    normalised = functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)
    return round_rows(normalised) if rounds else normalised


@overload
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    inner: torch.Tensor | None = None,
    rounds: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, inner: torch.Tensor | None = None, rounds: bool
) -> Activations: ...
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, inner: torch.Tensor | None = None, rounds: bool = False
) -> Activations:
    """Adds x to residual in place and returns the normalised sum. Both are contiguous and have the same shape.

    `inner` is the weight of a norm that is applied to x before the addition (Gemma 2). `rounds` rounds the result, as `round_rows` does.
    """
    if x.is_cuda:
        from chairlift.kernels import rms_norm as kernel  # as above

        if rounds:
            return Rounded(*kernel.add_rms_norm(x, residual, weight, eps, inner=inner, least=MIN_ABSMAX), x.dtype)
        return kernel.add_rms_norm(x, residual, weight, eps, inner=inner)
    residual.add_(x if inner is None else rms_norm(x, inner, eps))
    return rms_norm(residual, weight, eps, rounds=rounds)
