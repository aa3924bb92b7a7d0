"""The activation of a gated MLP, optionally fused with rounding to fp8."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch.nn import functional

from chairlift.layers.linear import MIN_ABSMAX, Activations, Rounded, round_rows


@overload
def act_mul(gate_up: torch.Tensor, activation: str, *, rounds: Literal[False] = False) -> torch.Tensor: ...
@overload
def act_mul(gate_up: torch.Tensor, activation: str, *, rounds: bool) -> Activations: ...
def act_mul(gate_up: torch.Tensor, activation: str, *, rounds: bool = False) -> Activations:
    """Maps contiguous gate_up [rows, 2 * columns] to activation(gate) * up [rows, columns].

    The activation is silu or gelu_tanh (GELU's tanh approximation). `rounds` rounds the result, as `round_rows` does.
    """
    if gate_up.is_cuda:
        # triton is only installed for GPUs.
        from chairlift.kernels import act_mul as kernel

        if rounds:
            return Rounded(*kernel.act_mul(gate_up, activation, least=MIN_ABSMAX), gate_up.dtype)
        return kernel.act_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, -1)
    product = (functional.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else functional.silu(gate)).mul_(up)
    return round_rows(product) if rounds else product
