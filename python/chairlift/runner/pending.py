"""Results that may still be on their way from a device. Without torch."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class PendingResult(Protocol):
    """An array that is being copied to the host."""

    def numpy(self) -> np.ndarray:
        """Waits for the copy and returns it."""


class ReadyResult:
    """An array that is already on the host."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        """The array."""
        return self._array
