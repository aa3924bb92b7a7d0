"""Flags that mean nothing beside others."""

from __future__ import annotations

from chairlift.errors import InvalidSetting


def refuse(why: str, **flags: object) -> None:
    """Raises InvalidSetting if one of these was given, and so is not None: it would do nothing, and `why` says the reason."""
    if beside := next((name for name, value in flags.items() if value is not None), None):
        raise InvalidSetting(f"--{beside.replace('_', '-')} does nothing here: {why}")
