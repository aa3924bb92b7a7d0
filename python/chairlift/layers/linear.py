"""Matrix products with a model's weights, kept as they are computed with or in 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

FORMS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max)}
"""The forms of 8 bits: torch's type, and the largest number that is used of it."""
SMALLEST = 1e-12
"""Of a row's largest number, so that a row of zeros has a scale too."""


class Quantised(NamedTuple):
    """A matrix in 8 bits: numbers [rows, columns], and what each row is to be multiplied by, fp32 [rows, 1]."""

    numbers: torch.Tensor
    scale: torch.Tensor


def quantise(x: torch.Tensor, form: str) -> Quantised:
    """Rounds the matrix x to a form of FORMS, so that each row's largest number is the form's own."""
    dtype, largest = FORMS[form]
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=SMALLEST) / largest
    # Divided in fp32, and clamped, for fp32 rounds too.
    numbers = (x / scale).clamp_(-largest, largest)
    return Quantised((numbers.round_() if form == "int8" else numbers).to(dtype), scale)


class Linear:
    """A linear layer: weight [out, in], and bias [out] if there is one.

    With a `form` of FORMS the weight is kept in 8 bits, with a scale for each output. In int8 it is multiplied by activations as they
    are (weight only). In fp8 these are rounded to 8 bits too, each row with a scale of its own, and the device multiplies what has 8
    bits (W8A8): for a CUDA device of compute capability 8.9 or more, with activations in bfloat16, and rows and columns that are
    multiples of 16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, form: str | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.scale: torch.Tensor | None = None
        if form:
            self.weight, self.scale = quantise(weight, form)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [rows, in] to [rows, out]."""
        if self.scale is None:
            return functional.linear(x, self.weight, self.bias)
        if self.weight.dtype == torch.int8:
            # For one product the weight is whole. torch's own for int8 (`_weight_int8pack_mm`) is no help, as of 2.15: on CUDA a thread
            # sums up all of a row, and on a CPU it is slow in fp32, and reads beyond matrices with odd sides.
            whole = torch.empty(self.weight.shape, dtype=x.dtype, device=x.device)
            return functional.linear(x, torch.mul(self.weight, self.scale, out=whole), self.bias)
        rounded, scale = quantise(x, "fp8")
        product = torch._scaled_mm(rounded, self.weight.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=x.dtype)
        return product if self.bias is None else product.add_(self.bias)
