"""Tensors as numpy arrays. numpy has no bfloat16: its bits are uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = np.ndarray[Any, np.dtype[Any]]
"""A tensor: float32, float16, or the bits of bfloat16 as uint16."""


def as_float32(array: Array) -> NDArray[np.float32]:
    """Returns a tensor's values in fp32."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)
