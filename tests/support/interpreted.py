"""What the checks of kernels in Triton's interpreter share. bf16 is not among the dtypes: the interpreter computes nonsense with it."""

import torch

# Fresh memory is full of NaN, or of the largest integer: what a kernel forgets to write is seen.
torch.use_deterministic_algorithms(True)

DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3}
"""With the error relative to the largest number that rounding may make."""


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = DTYPES[expected.dtype]
    scale = expected.nan_to_num().abs().max().item()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
