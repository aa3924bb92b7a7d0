"""Linear layers, optionally with weights quantised to 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

QUANTIZATIONS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max)}
"""torch's dtype of each quantization, and its largest number."""
MIN_ABSMAX = 1e-12
"""Lower bound of a row's largest magnitude, so that a row of zeros has a scale."""


class Quantised(NamedTuple):
    """A matrix in 8 bits: numbers [rows, columns] and a scale per row, fp32 [rows, 1]."""

    numbers: torch.Tensor
    scale: torch.Tensor


def quantise(x: torch.Tensor, quantization: str) -> Quantised:
    """Rounds the matrix x to a quantization of QUANTIZATIONS. Each row is scaled so that its largest magnitude is the dtype's."""
    dtype, largest = QUANTIZATIONS[quantization]
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=MIN_ABSMAX) / largest
    # The division rounds too, hence the clamp.
    numbers = (x / scale).clamp_(-largest, largest)
    return Quantised((numbers.round_() if quantization == "int8" else numbers).to(dtype), scale)


class Linear:
    """A linear layer: weight [out, in] and an optional bias [out].

    A `quantization` of QUANTIZATIONS keeps the weight in 8 bits with a scale per output. int8 is weight-only (W8A16). fp8 also
    quantises the activations, with a scale per row (W8A8); it needs a CUDA device of compute capability 8.9, bfloat16 activations, and
    rows and columns that are multiples of 16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: str | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.scale: torch.Tensor | None = None
        if quantization:
            self.weight, self.scale = quantise(weight, quantization)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [rows, in] to [rows, out]."""
        if self.scale is None:
            return functional.linear(x, self.weight, self.bias)
        if self.weight.dtype == torch.int8:
            if x.is_cuda:
                # triton is only installed for GPUs.
                from chairlift.kernels import int8_linear as kernel

                if len(x) <= kernel.MAX_ROWS:
                    return kernel.int8_linear(x, self.weight, self.scale, self.bias)
            # The weight is dequantised for each product. torch's `_weight_int8pack_mm` (as of 2.15) is slower: on CUDA one thread sums a
            # whole row, and on a CPU it is slow in fp32 and reads out of bounds for odd sizes.
            whole = torch.empty(self.weight.shape, dtype=x.dtype, device=x.device)
            return functional.linear(x, torch.mul(self.weight, self.scale, out=whole), self.bias)
        rounded, scale = _rounded(x)
        product = torch._scaled_mm(rounded, self.weight.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=x.dtype)
        return product if self.bias is None else product.add_(self.bias)


def _rounded(x: torch.Tensor) -> Quantised:
    """The activations in fp8, in one launch on a GPU."""
    if x.is_cuda:
        from chairlift.kernels.quantise_rows import quantise_rows  # as above

        return Quantised(*quantise_rows(x.contiguous(), MIN_ABSMAX))
    return quantise(x, "fp8")
