"""Linear layers, optionally with quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from chairlift.kernels import LARGEST

QUANTIZATIONS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, LARGEST)}
"""torch's dtype of each quantization, and its largest number."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The positive numbers of MXFP4, after the OCP Microscaling Formats specification (2023)."""
MIN_ABSMAX = 1e-12
"""Lower bound of a row's largest magnitude, so that a row of zeros has a scale."""


class Quantised(NamedTuple):
    """A matrix [rows, columns] of 4 or 8 bits: (numbers - zero) * scale.

    Numbers are int8 or e4m3 [rows, columns], or 4 bits in uint8 [rows, columns / 2], of which a byte's lower half is the earlier column.
    Scales are of `group` columns each, or of a whole row if `group` is 0: [rows, groups]. Only integers of 4 bits have zeros: uint8
    [rows, groups]. Numbers of 4 bits without zeros are MXFP4's e2m1, and their scales are exponents in uint8. With `order`, int64
    [columns], column i is multiplied by input `order[i]`, which may be another process's.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    group: int = 0
    order: torch.Tensor | None = None

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
        """The numbers, scales, zeros and group, as kernels take them."""
        return self.numbers, self.scale, self.zero, self.group

    @property
    def columns(self) -> int:
        """The matrix's columns."""
        return self.numbers.shape[1] * (2 if self.numbers.dtype == torch.uint8 else 1)


Weight = torch.Tensor | Quantised
"""The weight [out, in] of a linear layer."""


class Rounded(NamedTuple):
    """Rows of activations in fp8: e4m3 numbers [rows, columns] times a scale of each row, fp32 [rows, 1]. `dtype` was theirs before."""

    numbers: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


Activations = torch.Tensor | Rounded
"""The input [rows, in] of a linear layer."""


def quantise(x: torch.Tensor, quantization: str) -> Quantised:
    """Rounds the matrix x to a quantization of QUANTIZATIONS. Each row is scaled so that its largest magnitude is the dtype's."""
    dtype, largest = QUANTIZATIONS[quantization]
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=MIN_ABSMAX) / largest
    # The division rounds too, hence the clamp.
    numbers = (x / scale).clamp_(-largest, largest)
    return Quantised((numbers.round_() if quantization == "int8" else numbers).to(dtype), scale)


def dequantise(weight: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in `dtype`, multiplied out in fp32. Its columns are in the order in which they are stored."""
    numbers, scale, zero, group, _ = weight

    def per_column(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(group, 1)[:, : weight.columns] if group else x

    if numbers.dtype == torch.uint8:
        numbers = torch.stack((numbers & 15, numbers >> 4), 2).flatten(1)
        if zero is not None:
            numbers = numbers.float() - per_column(zero)
        else:
            numbers = torch.tensor([*E2M1, *(-number for number in E2M1)], device=numbers.device)[numbers.int()]
            scale = torch.exp2(scale.float() - 127)
    return (numbers.float() * per_column(scale)).to(dtype)


def multiplied_out(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """A matrix in `dtype`, with its columns in the order of the inputs."""
    if not isinstance(weight, Quantised):
        return weight
    whole = dequantise(weight, dtype)
    if weight.order is None:
        return whole
    out = torch.empty_like(whole)
    out[:, weight.order] = whole
    return out


def round_rows(x: torch.Tensor) -> Rounded:
    """Rounds each row of activations to fp8 with its own scale, in one launch on a GPU."""
    if x.is_cuda:
        # triton is only installed for GPUs.
        from chairlift.kernels.quantise_rows import quantise_rows

        return Rounded(*quantise_rows(x.contiguous(), MIN_ABSMAX), x.dtype)
    numbers, scale, *_ = quantise(x, "fp8")
    return Rounded(numbers, scale, x.dtype)


def stack(parts: Sequence[Weight]) -> Weight:
    """Stacks matrices with the same columns. Raises ValueError unless all are quantised in the same way or none is."""
    if len(parts) == 1:
        return parts[0]
    whole = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(whole) == len(parts):
        return torch.cat(whole)
    packed = [part for part in parts if isinstance(part, Quantised)]
    kinds = {(part.numbers.dtype, part.group, part.zero is None, part.order is None) for part in packed}
    orders = [part.order for part in packed if part.order is not None]
    if whole or len(kinds) > 1 or not all(torch.equal(order, orders[0]) for order in orders):
        raise ValueError("matrices of the same input are quantised in different ways")
    zeros = [part.zero for part in packed if part.zero is not None]
    scale = torch.cat([part.scale for part in packed])
    # torch cannot concatenate fp8.
    numbers = torch.cat([part.numbers.view(torch.uint8) for part in packed]).view(packed[0].numbers.dtype)
    return Quantised(numbers, scale, torch.cat(zeros) if zeros else None, packed[0].group, packed[0].order)


def take_rows(weight: Weight, rows: torch.Tensor) -> Weight:
    """The rows of a matrix whose numbers are `rows`, int64, in that order."""
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    # torch cannot index fp8.
    numbers = weight.numbers.view(torch.uint8)[rows].view(weight.numbers.dtype)
    return weight._replace(numbers=numbers, scale=weight.scale[rows], zero=None if weight.zero is None else weight.zero[rows])


class Linear:
    """A linear layer: weight [out, in] and an optional bias [out].

    Products with a quantised weight are computed in the activations' dtype. With `rounds_activations` they are computed in fp8: each
    row of activations is rounded with its own scale (W8A8). That needs a weight of e4m3 with a scale of each row, a CUDA device of compute
    capability 8.9, bfloat16 activations, and rows and columns that are multiples of 16.
    """

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None, *, rounds_activations: bool = False) -> None:
        if rounds_activations and isinstance(weight, Quantised):
            # `_scaled_mm` takes no other scales.
            weight = weight._replace(scale=weight.scale.float())
        self.weight, self.bias, self.rounds_activations = weight, bias, rounds_activations and isinstance(weight, Quantised)
        self._arrived: torch.Tensor | None = None
        """Counters of the kernel for a few rows, which no other layer's launches use."""

    @property
    def gathers(self) -> bool:
        """Whether columns are in another order than the inputs, so that a process with some columns may need any input."""
        return isinstance(self.weight, Quantised) and self.weight.order is not None

    def __call__(self, x: Activations) -> torch.Tensor:
        """Maps [rows, in] to [rows, out]. Takes rounded activations only if it `rounds_activations`."""
        weight = self.weight
        if self.rounds_activations:
            assert isinstance(weight, Quantised)
            rounded, scale, dtype = x if isinstance(x, Rounded) else round_rows(x)
            if rounded.is_cuda:
                from chairlift.kernels import fp8_linear  # triton is only installed for GPUs

                if len(rounded) <= fp8_linear.MAX_ROWS:
                    return fp8_linear.fp8_linear(rounded, scale, weight.numbers, weight.scale, self.bias, dtype)
            # Without `use_fast_accum` torch's kernel for scales of rows moves its sums out of the tensor cores again and again.
            scales = {"scale_a": scale, "scale_b": weight.scale.t()}
            product = torch._scaled_mm(rounded, weight.numbers.t(), **scales, out_dtype=dtype, use_fast_accum=True)
            return product if self.bias is None else product.add_(self.bias)
        assert isinstance(x, torch.Tensor)
        if isinstance(weight, torch.Tensor):
            return functional.linear(x, weight, self.bias)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if not x.is_cuda:
            return functional.linear(x, dequantise(weight, x.dtype), self.bias)
        from chairlift.kernels import dequantise as dequantising  # as above
        from chairlift.kernels import quantised_linear as multiplying

        # Tiles of 32 bits would not fit into the shared memory of all devices.
        if x.element_size() == 2 and len(x) <= multiplying.max_rows(weight.zero):
            if self._arrived is None:
                self._arrived = multiplying.counters(weight.numbers)
            return multiplying.quantised_linear(x, *weight.stored, self.bias, self._arrived)
        return functional.linear(x, dequantising.dequantise(*weight.stored, x.shape[1], x.dtype), self.bias)
