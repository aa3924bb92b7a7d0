"""The base class of Triton's errors: a kernel does not compile, or needs more than the device has."""

from triton.errors import TritonError

__all__ = ["TritonError"]
