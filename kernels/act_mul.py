"""The activation of a gated MLP on the GPU: activation(gate) * up, optionally rounded to 8 bits."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

from typing import overload

import torch
import triton.language as tl
from torch.nn import functional

from chairlift.kernels import LARGEST
from chairlift.kernels.cached_launch import jit
from chairlift.kernels.quantise_rows import rounded_rows, store_rounded, whole_row

BLOCK = 1024
"""Columns per program: 8 per lane of its 4 warps, which are 16 bytes in half precision."""

ROOT = 0.7978845608028654
"""The square root of 2 / pi."""


@jit()
def _act_mul_kernel(
    out_ptr,
    scale_ptr,
    gate_up_ptr,
    columns,
    root: tl.constexpr,
    gelu: tl.constexpr,
    slope: tl.constexpr,
    limit: tl.constexpr,
    least: tl.constexpr,
    largest: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * block + tl.arange(0, block)
    mask = offsets < columns
    gate = tl.load(gate_up_ptr + row * 2 * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * columns + columns + offsets, mask=mask, other=0.0).to(tl.float32)
    if limit is not None:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + 1
    # 1 + tanh(u) is twice the sigmoid of 2u, which does not overflow.
    weight = tl.sigmoid(2 * root * (gate + 0.044715 * gate * gate * gate)) if gelu else tl.sigmoid(slope * gate)
    # Rounded to the dtype of the gates first, so that 8 bits equal those of two separate operations.
    product = (gate * weight * up).to(gate_up_ptr.dtype.element_ty)
    if scale_ptr is not None:
        store_rounded(out_ptr, scale_ptr, row, columns, offsets, product.to(tl.float32), least, largest)
    else:
        tl.store(out_ptr + row * columns + offsets, product, mask=mask)


@overload
def act_mul(gate_up: torch.Tensor, activation: str, *, clamp: tuple[float, float] | None = None) -> torch.Tensor: ...
@overload
def act_mul(gate_up: torch.Tensor, activation: str, *, least: float) -> tuple[torch.Tensor, torch.Tensor]: ...
def act_mul(
    gate_up: torch.Tensor, activation: str, *, least: float | None = None, clamp: tuple[float, float] | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Maps contiguous gate_up [rows, 2 * columns] to activation(gate) * up [rows, columns].

    The activation is silu or gelu_tanh (GELU's tanh approximation). With `clamp` (a, c) it is gate * sigmoid(a * gate) * (1 + up), with
    gate at most c and up between -c and c. With `least`, returns what `quantise_rows` makes of the result.
    """
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    if least is None:
        out, scale, block, warps = gate_up.new_empty(rows, columns), None, BLOCK, 4
    else:
        # The scale needs the whole row.
        (out, scale), (block, warps) = rounded_rows(gate_up, rows, columns), whole_row(columns)
    slope, limit = clamp or (1.0, None)
    _act_mul_kernel[(rows, -(-columns // block))](
        out,
        scale,
        gate_up,
        columns,
        root=ROOT,
        gelu=activation == "gelu_tanh",
        slope=slope,
        limit=limit,
        least=least,
        largest=LARGEST,
        block=block,
        num_warps=warps,
    )
    return out if scale is None else (out, scale)


def act_mul_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Reference in torch, for tests: computed in fp32 and rounded once at the end."""
    gate, up = gate_up.float().chunk(2, -1)
    active = functional.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else functional.silu(gate)
    return (active * up).to(gate_up.dtype)
