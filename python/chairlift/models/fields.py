"""Reads single values of a checkpoint's JSON files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from chairlift.errors import ModelNotFound, UnsupportedModel

MAX_LAYERS = 10_000
"""More layers than any model has. Lists with an entry for each layer of a wrong number could exhaust the memory."""


class NoNativeModel(UnsupportedModel):
    """The model has no native code in chairlift; transformers may support it."""


class Entries(dict[str, Any]):
    """The entries of a config.json. It remembers which ones were read, also in copies with other entries."""

    def __init__(self, entries: Mapping[str, Any], read: set[str] | None = None) -> None:
        super().__init__(entries)
        self._read = set[str]() if read is None else read

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an entry as `dict.get` does."""
        self._read.add(name)
        return super().get(name, default)

    def __or__(self, others: Mapping[str, Any]) -> Entries:  # type: ignore[override]
        return Entries(super().__or__(dict(others)), self._read)

    def unread(self) -> dict[str, Any]:
        """Returns the entries that were not read."""
        return {name: value for name, value in self.items() if name not in self._read}


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


def parse_size(raw: Mapping[str, object], name: str, default: int | None = None) -> int:
    """Returns a positive integer of 31 bits of the config. None and absence mean the default."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise UnsupportedModel(f"config.json: {name} must be a positive integer, got {value!r:.50}")
    return value


def parse_layers(raw: Mapping[str, object]) -> int:
    """Returns the number of layers."""
    if (layers := parse_size(raw, "num_hidden_layers")) > MAX_LAYERS:
        raise UnsupportedModel(f"config.json: num_hidden_layers must be at most {MAX_LAYERS}, got {layers}")
    return layers


def parse_count(raw: Mapping[str, object], name: str, default: int | None = 0) -> int:
    """Returns an integer of the config that is not negative. Absence means the default, None means 0."""
    value = raw.get(name, default) or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnsupportedModel(f"config.json: {name} must be a number that is not negative, got {value!r:.50}")
    return value


def parse_table(raw: Mapping[str, object], name: str) -> Mapping[str, Any]:
    """Returns an object of the config. None and absence mean an empty one."""
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"config.json: {name} must be an object, got {value!r:.50}")
    return value


def parse_names(raw: Mapping[str, object], name: str) -> list[str] | None:
    """Returns a list of words of the config; None if it has none."""
    value = raw.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        raise UnsupportedModel(f"config.json: {name} must be a list of names, got {value!r:.200}")
    return value


def parse_number(raw: Mapping[str, object], name: str, default: float | None = None) -> float:
    """Returns a positive finite number of the config. None and absence mean the default."""
    value = raw.get(name)
    value = default if value is None else value
    if not is_positive(value):
        raise UnsupportedModel(f"config.json: {name} must be a positive number, got {value!r:.100}")
    return float(value)


def is_positive(value: Any) -> TypeGuard[int | float]:
    """Whether it is a positive number that a float can hold. JSON has integers of any size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def parse_dtype(raw: Mapping[str, object]) -> str | None:
    """Returns the checkpoint's dtype as a word; None if its config does not say."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    return str(name).removeprefix("torch.") if name is not None else None
