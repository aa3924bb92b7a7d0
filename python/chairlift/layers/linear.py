"""Matrix products with a model's weights, one row per token, each row's result its own affair."""

from __future__ import annotations

import torch
from torch.nn import functional

ROW_MULTIPLE = 4
"""Token axes are padded to a multiple of this: see Linear."""


def padded_rows(rows: int) -> int:
    """How many rows a token axis of `rows` tokens gets."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


class Linear:
    """`x @ weight.T + bias` with the weight kept in the layout that its device multiplies fastest.

    On CPU in fp32 that is oneDNN's packed layout. Measured on two AVX-512 cores with 576..49152 x 576..1536 weights: it is as
    fast as `F.linear` from 64 rows on, 1.3 times as fast at 8 rows and 1.5 times at 4 (half the time for a vocabulary of 49152);
    `(W @ x.T).T` lies between the two. And it is the only one of the three whose rows are equal bit for bit for every number of
    rows from 2 to 512: MKL, behind the others, changes its order of summation at 2, 4, 16 and, for some shapes, 64 and 200 rows.
    One row alone differs in oneDNN too when there are 1536 or more columns, so callers pad the token axis with `padded_rows`: to
    4, because oneDNN compiles a kernel for each number of rows it meets (about 1 ms, once) and a quarter as many is enough.
    Where oneDNN is missing (or off the CPU) this is `F.linear`, whose rows may differ in the last bits from batch to batch.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Takes the weight [out, in] and the bias [out], which may be freed afterwards if it was packed."""
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64) if self.packed else weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [rows, in] to [rows, out]."""
        if not self.packed:
            return functional.linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product
