"""Half the time of Triton's interpreter: at each call of a function within a kernel it looks for what to replace in its language again."""

import inspect
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter

_patch = interpreter._patch_builtin
_names: dict[object, str] = {}
"""For each part of the language, one of the names that are replaced in it."""


def _patch_once(part: object, *rest: Any) -> None:
    if part not in _names:
        _names[part] = next((name for name, member in inspect.getmembers(part) if is_builtin(member)), "")
    if not _names[part] or is_builtin(getattr(part, _names[part])):
        _patch(part, *rest)


interpreter._patch_builtin = _patch_once
