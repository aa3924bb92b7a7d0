"""Root-mean-square normalisation of rows, on the GPU."""

# Triton has no types: mypy checks the launchers alone.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(out_ptr, x_ptr, weight_ptr, eps, columns, block: tl.constexpr):
    # One program normalises one row, which it holds whole: sums are in fp32 and in the same order whatever the number of rows.
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    mask = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(out_ptr + row * columns + offsets, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises contiguous x [..., columns] along its last axis and scales it by weight [columns]."""
    out = torch.empty_like(x)
    columns = x.shape[-1]
    block = triton.next_power_of_2(columns)
    # 32 lanes a warp, 8 values or more a lane.
    warps = min(max(block // 256, 1), 16)
    _rms_norm_kernel[(x.numel() // columns,)](out, x, weight, eps, columns, block=block, num_warps=warps)
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in torch, for tests: fp32 inside, rounded once at the end."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
