"""Notices kernels that Triton compiles after the start, while requests wait."""

from __future__ import annotations

import logging
from typing import Any

from triton import knobs

log = logging.getLogger("chairlift")


def watch() -> None:
    """Logs a warning for each kernel that is compiled from now on in this process."""
    knobs.runtime.jit_post_compile_hook = _warn


def pause() -> None:
    """Logs nothing until `watch` is called again: an engine starts, and compiles its kernels."""
    knobs.runtime.jit_post_compile_hook = None


def _warn(*, fn: Any, **_: object) -> None:
    log.warning("requests waited while the kernel %s was compiled: please report this with the output of `chairlift doctor`", fn.name)
