"""Matrix products with a model's weights."""

from __future__ import annotations

import torch
from torch.nn import functional


class Linear:
    """A linear layer: weight [out, in], and bias [out] if there is one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [rows, in] to [rows, out]."""
        return functional.linear(x, self.weight, self.bias)
