"""Numbers as integers that sort as they do, for the kernels of this room."""

# Triton has no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """Integers (int32) in the order of fp32 numbers, both zeros being one; NaNs lie beyond the infinities."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number(order):
    """The fp32 number of an integer that `ordered` gave."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pair(x, token):
    """A number and its token as one int64: the largest of them is the first of the largest numbers."""
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(pairs):
    """The tokens of pairs."""
    return 0x7FFFFFFF - (pairs & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def number_of(pairs):
    """The numbers of pairs."""
    return number((pairs >> 32).to(tl.int32))
