"""Maps fp32 numbers to integers with the same order, for the sampling kernels."""

# Triton has no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """Returns int32 integers in the order of fp32 numbers. Both zeros are equal; NaNs lie beyond the infinities."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number(order):
    """Returns the fp32 number of an integer from `ordered`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pair(x, token):
    """Packs a number and its token into one int64.

    The largest pair has the largest number and, among equal numbers, the smallest token id.
    """
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(pairs):
    """Returns the tokens of pairs."""
    return 0x7FFFFFFF - (pairs & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def number_of(pairs):
    """Returns the numbers of pairs."""
    return number((pairs >> 32).to(tl.int32))
