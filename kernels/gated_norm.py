"""Root-mean-square norms of the outputs of recurrent heads on the GPU, with a gate before or after the norm."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type,misc"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from chairlift.kernels.cached_launch import jit
from chairlift.kernels.quantise_rows import whole_row

if TYPE_CHECKING:
    from chairlift.layers.recurrent import Heads


@jit()
def _gated_norm_kernel(
    out_ptr,
    x_ptr,
    gates_ptr,
    norm_ptr,
    eps,
    width,
    pitch,
    first,
    group: tl.constexpr,
    weights: tl.constexpr,
    gate_first: tl.constexpr,
    block: tl.constexpr,
):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * group
    offsets = tl.arange(0, block)
    mask = offsets < group
    x = tl.load(x_ptr + row * width + start + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gates_ptr + row * pitch + first + start + offsets, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + start % weights + offsets, mask=mask, other=0.0)
    gate *= tl.sigmoid(gate)
    if gate_first:
        x *= gate
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / group + eps) * weight
    if not gate_first:
        normed *= gate
    tl.store(out_ptr + row * width + start + offsets, normed.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm(x: torch.Tensor, projected: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Normalises the outputs x [T, width] of heads in groups, multiplied by their gates in `projected`, contiguous rows (see `Heads`)."""
    width, group = x.shape[1], heads.norm_group
    out = torch.empty_like(x)
    block, warps = whole_row(group)
    _gated_norm_kernel[(len(x), width // group)](
        out,
        x,
        projected,
        heads.norm,
        heads.eps,
        width,
        projected.shape[1],
        heads.offsets.gates,
        group=group,
        weights=len(heads.norm),
        gate_first=not heads.delta,
        block=block,
        num_warps=warps,
    )
    return out
