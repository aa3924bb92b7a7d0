"""Returns memory to the system."""

from __future__ import annotations

import sys


def trim() -> None:
    """Returns freed memory to the system, which glibc keeps otherwise."""
    if sys.platform == "linux":
        import ctypes

        call = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none
        if call is not None:
            call(0)
