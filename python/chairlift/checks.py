"""Validates the fields of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chairlift.errors import InvalidRequest


def integer(name: str, value: object, low: int, high: int) -> None:
    """Raises InvalidRequest unless `value` is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}, got {value!r:.100}", param=name)


def choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises InvalidRequest unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequest(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {value!r:.100}", param=name)


def number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Raises InvalidRequest unless `value` is a finite number from `low` to `high`; with `above`, it must exceed `low`."""
    # `isfinite` fails for an integer that no float can hold, so the bounds come first.
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high and math.isfinite(value)
    if not ok or (above and value == low):
        span = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be a number {span}, got {value!r:.100}", param=name)


def text(name: str, value: object, low: int, high: int) -> None:
    """Raises InvalidRequest unless `value` is a string of `low` to `high` characters."""
    if not isinstance(value, str) or not low <= len(value) <= high:
        raise InvalidRequest(f"{name} must be a string of {low} to {high} characters, got {value!r:.100}", param=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} has a lone surrogate, which is no Unicode text", param=name) from None
