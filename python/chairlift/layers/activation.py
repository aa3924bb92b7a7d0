"""The activation of a gated MLP."""

from __future__ import annotations

import torch
from torch.nn import functional


def act_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Maps contiguous gate_up [rows, 2 * columns] to activation(gate) * up [rows, columns].

    The activation is silu or gelu_tanh (GELU's tanh approximation).
    """
    if gate_up.is_cuda:
        # triton is only installed for GPUs.
        from chairlift.kernels import act_mul as kernel

        return kernel.act_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, -1)
    return (functional.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else functional.silu(gate)).mul_(up)
