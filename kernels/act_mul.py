"""The activation of a gated MLP on the GPU: activation(gate) * up."""

# Triton has no types: mypy checks only the launchers.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg,arg-type"

from __future__ import annotations

import torch
import triton.language as tl
from torch.nn import functional

from chairlift.kernels.cached_launch import jit

BLOCK = 1024
"""Columns per program: 8 per lane of its 4 warps, which are 16 bytes in half precision."""

ROOT = 0.7978845608028654
"""The square root of 2 / pi."""


@jit()
def _act_mul_kernel(out_ptr, gate_up_ptr, columns, root: tl.constexpr, gelu: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * block + tl.arange(0, block)
    mask = offsets < columns
    gate = tl.load(gate_up_ptr + row * 2 * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * columns + columns + offsets, mask=mask, other=0.0).to(tl.float32)
    # 1 + tanh(u) is twice the sigmoid of 2u, which does not overflow.
    weight = tl.sigmoid(2 * root * (gate + 0.044715 * gate * gate * gate)) if gelu else tl.sigmoid(gate)
    tl.store(out_ptr + row * columns + offsets, (gate * weight * up).to(out_ptr.dtype.element_ty), mask=mask)


def act_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Maps contiguous gate_up [rows, 2 * columns] to activation(gate) * up [rows, columns].

    The activation is silu or gelu_tanh (GELU's tanh approximation).
    """
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    grid = (rows, -(-columns // BLOCK))
    _act_mul_kernel[grid](out, gate_up, columns, root=ROOT, gelu=activation == "gelu_tanh", block=BLOCK, num_warps=4)
    return out


def act_mul_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Reference in torch, for tests: computed in fp32 and rounded once at the end."""
    gate, up = gate_up.float().chunk(2, -1)
    active = functional.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else functional.silu(gate)
    return (active * up).to(gate_up.dtype)
