"""Fields that Ollama's routes share: the model's name and how long it stays loaded."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import WithJsonSchema

from chairlift.errors import InvalidRequest, brief
from chairlift.settings import parse_duration

KeepAlive = Annotated[Any, WithJsonSchema({"type": ["number", "string"]})]
"""Seconds, or a duration like "5m"; -1 for ever, 0 not at all."""


def keep_alive_seconds(value: Any) -> float | None:
    """Returns a request's `keep_alive` in seconds, infinite if it is negative; raises InvalidRequest."""
    if value is None:
        return None
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return math.inf if value < 0 else float(value)
        if not isinstance(value, str):
            raise ValueError
        return parse_duration(value)
    except (ValueError, OverflowError):  # no float can hold an integer of 400 digits
        message = f'keep_alive must be a number of seconds, or a duration like "5m", got {brief(value)}'
        raise InvalidRequest(message, param="keep_alive") from None


def served_name(name: str | None) -> str | None:
    """Returns a model's name without the tag that Ollama's clients add."""
    return None if name is None else name.removesuffix(":latest")
