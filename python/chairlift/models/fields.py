"""Reads single values of a checkpoint's JSON files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from chairlift.errors import ModelNotFound, UnsupportedModel


class NoNativeModel(UnsupportedModel):
    """The model has no native code in chairlift; transformers may support it."""


def read_json(directory: Path, name: str = "config.json") -> Any:
    """Reads a JSON file of a checkpoint's directory; config.json must hold an object.

    Raises ModelNotFound if it cannot be read, UnsupportedModel if it is not valid.
    """
    path = directory / name
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFound(f"{directory} holds no readable {name} ({error.strerror}): is it a model's directory?") from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from None
    if name == "config.json" and not isinstance(raw, dict):
        raise UnsupportedModel(f"{path} must hold a JSON object")
    return raw


def parse_size(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    """Returns a positive integer of the config. None and absence mean the default."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def parse_number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    """Returns a positive finite number of the config. None and absence mean the default."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModel(f"config.json: {name} must be a positive number, got {value!r:.100}")
    return float(value)


def parse_dtype(raw: dict[str, Any]) -> str | None:
    """Returns the checkpoint's dtype as a word; None if its config does not say."""
    name = raw.get("dtype", raw.get("torch_dtype"))
    return str(name).removeprefix("torch.") if name is not None else None
