"""Errors of kernels that cannot run on a device: Triton's, for those that do not compile, and our own."""

from triton.errors import TritonError

__all__ = ["KERNEL_ERRORS", "HeadsTooLarge", "TritonError"]


class HeadsTooLarge(ValueError):
    """A device has too little shared memory for a model's attention heads."""


KERNEL_ERRORS = (TritonError, HeadsTooLarge)
