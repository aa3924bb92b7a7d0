"""The activation of an MLP, optionally fused with rounding to fp8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, overload

import torch
from torch.nn import functional

from chairlift.layers.linear import MIN_ABSMAX, Activations, Rounded, round_rows

_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda x: x.relu().square_(),
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
}


@overload
def activate(x: torch.Tensor, activation: str, *, rounds: Literal[False] = False) -> torch.Tensor: ...
@overload
def activate(x: torch.Tensor, activation: str, *, rounds: bool) -> Activations: ...
def activate(x: torch.Tensor, activation: str, *, rounds: bool = False) -> Activations:
    """Maps contiguous x [rows, 2 * columns], gates and what they gate, to activation(gate) * up [rows, columns].

    The activation is silu or gelu_tanh (GELU's tanh approximation), or for x [rows, columns] without gates relu, relu2, the squares of
    positive numbers, gelu, or gelu_new, which is gelu_tanh. `rounds` rounds the result, as `round_rows` does.
    """
    if plain := _PLAIN.get(activation):
        return round_rows(plain(x)) if rounds else plain(x)
    if x.is_cuda:
        # triton is only installed for GPUs.
        from chairlift.kernels import act_mul as kernel

        if rounds:
            return Rounded(*kernel.act_mul(x, activation, least=MIN_ABSMAX), x.dtype)
        return kernel.act_mul(x, activation)
    gate, up = x.chunk(2, -1)
    product = (functional.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else functional.silu(gate)).mul_(up)
    return round_rows(product) if rounds else product
