"""Errors of kernels that cannot run on a device: Triton's, for those that do not compile, and our own."""

from triton.errors import TritonError
from triton.runtime import driver

__all__ = ["KERNEL_ERRORS", "HeadsTooLarge", "TritonError", "load_launcher"]


class HeadsTooLarge(ValueError):
    """A device has too little shared memory for a model's attention heads."""


KERNEL_ERRORS = (TritonError, HeadsTooLarge)


def load_launcher() -> None:
    """Loads the C module with which Triton starts kernels. Compiles it unless Triton's cache has it.

    Raises RuntimeError without a C compiler, and CalledProcessError if the compiler fails.
    """
    # The first use of an attribute makes the driver in Triton 3.4, and that of `active` in later versions.
    _ = driver.active.get_current_target
