"""Settings: fields of a dataclass that are also flags and environment variables."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, field, fields
from numbers import Real
from typing import Any

from chairlift.scheduling import LONGEST_MS

ENV_PREFIX = "CHAIRLIFT_"


def flag(default: Any, help: str, parse: Callable[[str], Any] = str, *, group: str, secret: bool = False, **extra: Any) -> Any:
    """Defines a dataclass field that is the flag `--name` with `help` and `parse`, under the heading `group`."""
    return field(default=default, repr=not secret, metadata={"help": help, "parse": parse, "group": group, **extra})


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "Mapping": (Mapping, "a dict"),
}
"""The Python types that a setting's annotation allows, and their description."""


LARGEST_COUNT, LARGEST_SIZE = 2**31 - 1, 2**60
"""Limits of settings that count something, and of sizes in bytes. What is larger is a mistake."""


def check_ranges(settings: object, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raises ValueError if a setting that is not None lies outside its range."""
    for name, (least, most) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most}"
            raise ValueError(f"--{name.replace('_', '-')} must be {limit}, got {value!s:.50}")


def expand_paths(settings: object, names: Iterable[str]) -> None:
    """Replaces the `~` of the paths in these fields, also where a field has several by name."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, Mapping):
            value = {key: os.path.expanduser(path) for key, path in value.items()}
        elif value is not None:
            value = os.path.expanduser(value)
        object.__setattr__(settings, name, value)


def default_in_words(item: Field[Any]) -> str:
    """Returns a setting's default as `--help` shows it, with its unit; empty if there is none, or the help tells it."""
    value, parse = item.default, item.metadata.get("parse")
    match value:
        case None:
            return ""
        case ():
            return "none"
        case bool():
            return "on" if value else "off"
        case int() if parse is parse_size:
            return _size(value)
        case float() if parse is parse_duration:
            return _duration(value)
        case float():
            unit = {None: " seconds", "MS": " ms"}.get(item.metadata.get("metavar"), "")
            return f"{value:,g}{unit}"
    return str(value)


def _size(value: int) -> str:
    """Writes a size as `parse_size` reads it."""
    for shift, suffix in ((30, "G"), (20, "M"), (10, "k")):
        if value and value % (1 << shift) == 0:
            return f"{value >> shift}{suffix}"
    return str(value)


def _duration(value: float) -> str:
    """Writes a duration as `parse_duration` reads it."""
    for seconds, unit in ((3600, "h"), (60, "m")):
        if value and value % seconds == 0:
            return f"{value / seconds:g}{unit}"
    return f"{value:g}s"


def typed(item: Field[Any], value: Any) -> Any:
    """Returns a value given in Python, a scalar of numpy's as Python's. Raises ValueError if it does not have the field's type.

    Text that is not Unicode is refused: in a path, Python writes bytes that are not UTF-8 as lone surrogates.
    """
    annotation = str(item.type)
    if value is None and annotation.endswith("| None"):
        return None
    if getattr(value, "shape", None) == ():
        value = value.item()
    kind, words = _KINDS[annotation.partition(" ")[0].partition("[")[0]]
    right = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    if annotation.startswith("Mapping[str, str]"):
        right = isinstance(value, Mapping) and all(isinstance(text, str) for text in (*value.keys(), *value.values()))
    if annotation.startswith("Mapping[str, int]"):
        words += " of whole numbers"
        right = isinstance(value, Mapping) and all(isinstance(key, str) and isinstance(number, int) for key, number in value.items())
    texts = (*value.keys(), *value.values()) if isinstance(value, Mapping) else (value,)
    if right and any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in texts):
        right, words = False, "text in UTF-8"
    if not right:
        raise ValueError(f"--{item.name.replace('_', '-')}: expected {words}, got {value!r:.100}")
    return value


def from_environment(cls: type, names: Collection[str], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Reads the fields of `cls` in `names` that `CHAIRLIFT_...` variables set. Raises ValueError with the variable's name."""
    found: dict[str, Any] = {}
    for item in fields(cls):
        text = environ.get(ENV_PREFIX + item.name.upper())
        if text is None or item.name not in names:
            continue
        try:
            found[item.name] = parse_value(item.metadata, item.type, text)
        except ValueError as error:
            raise ValueError(f"{ENV_PREFIX}{item.name.upper()}: {error}") from None
    return found


def parse_value(metadata: Mapping[str, Any], annotation: object, text: str) -> Any:
    """Converts the text of a flag or variable to the field's value. Raises ValueError if it is invalid."""
    if "bool" in str(annotation):
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError(f"expected true or false, got {text!r}")
    text = metadata.get("spellings", {}).get(text, text)
    check_choice(metadata, text)
    parse = metadata.get("parse", str)
    try:
        return parse(text)
    except ValueError:
        if parse in (int, float):  # their own messages mention literals and bases
            raise ValueError(f"expected a {'whole ' * (parse is int)}number, got {text!r}") from None
        raise


def names_in_files(items: Iterable[Field[Any]]) -> dict[str, str]:
    """Returns what a YAML or TOML file may call each field, with _ for -: its name, or that of another flag for it."""
    return {
        name.removeprefix("--").replace("-", "_"): item.name
        for item in items
        for name in (item.name, *item.metadata.get("aliases", ()))
        if name == item.name or name.startswith("--")
    }


def parse_entry(item: Field[Any], value: Any) -> Any:
    """Converts what a YAML or TOML file has for a field, as if it was written for the flag. Raises ValueError if it is invalid."""
    kind, parse = str(item.type), item.metadata.get("parse")
    match value:
        case Mapping() if kind.startswith("Mapping"):
            joined = ",".join(f"{name}={entry}" for name, entry in value.items())
            value = json.dumps(value, default=str) if parse is parse_json_object else joined
        case list() if kind.startswith("tuple") or "nargs" in item.metadata:
            value = ",".join(map(str, value))
        case Mapping() | list():
            raise ValueError(f"expected one value, got {value!r:.100}")
        case str():
            pass
        case _ if kind.startswith("str"):  # text that looks like a number, as 1.10, is another one if a file's reader converts it
            raise ValueError(f"expected text in quotes, got {value!r:.100}")
        case bool():
            value = str(value).lower()
    return parse_value(item.metadata, kind, str(value))


def check_choice(metadata: Mapping[str, Any], value: object) -> None:
    """Raises ValueError unless a field may have the value: it is one of `choices`, or of those that the program has added (`more`)."""
    choices = metadata.get("choices")
    if choices and value not in choices and value not in metadata.get("more", tuple)():
        hint = metadata.get("hints", {}).get(value)
        raise ValueError(f"expected one of {', '.join(choices)}, got {value!r}" + (f": {hint}" if hint else ""))


def parse_size(text: str) -> int:
    """Parses `4096`, `32k`, `2G` or `1.5GiB`. All suffixes are binary: k is 1,024, m 1,024 k, and so on, in lower and upper case."""
    text = text.strip()
    match = re.fullmatch(r"([^a-zA-Z]+)(?:([kmgt])(?:ib)?)?", text, re.IGNORECASE)
    try:
        if match is None:
            raise ValueError
        number, suffix = match.groups()
        if suffix is None:
            return int(number)
        return int(float(number) * 1024 ** " kmgt".index(suffix.lower()))
    except (ValueError, OverflowError):
        raise ValueError(f"not a size: {text!r} (try 4096, 32k or 2G)") from None


_SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 0.001, "s": 1, "m": 60, "h": 3600}
_UNIT = "|".join(_SECONDS)


def parse_duration(text: str) -> float:
    """Parses `90`, `30s`, `5m`, `1.5h`, `300ms` or, as Go writes it, `1h5m0s` as seconds; a negative one is infinite. Raises ValueError."""
    match = re.fullmatch(rf"\s*(-?)([0-9.]+|(?:[0-9.]+(?:{_UNIT}))+)\s*", text)
    try:
        if match is None:
            raise ValueError
        parts = re.findall(rf"([0-9.]+)({_UNIT})?", match[2])
        seconds = sum(float(number) * _SECONDS[unit or "s"] for number, unit in parts)
    except ValueError:
        raise ValueError(f"not a duration: {text!r:.100} (try 5m, 30s, 0, or -1 for ever)") from None
    return math.inf if match[1] and seconds else seconds


def parse_names(text: str) -> tuple[str, ...]:
    """Parses `chat,embed`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_weights(text: str) -> dict[str, int]:
    """Parses `alice=2,bob=1`. The weights are validated with all other settings."""
    weights = {}
    for item in text.split(","):
        name, equals, weight = item.rpartition("=")
        if not equals or not name.strip() or not weight.strip().isdecimal():
            raise ValueError(f"expected weights like alice=2,bob=1, got {text!r:.100}")
        weights[name.strip()] = int(weight)
    return weights


def parse_paths(text: str) -> dict[str, str]:
    """Parses `sql=/adapters/sql,chat=/adapters/chat`."""
    modules = {}
    for item in text.split(","):
        name, equals, path = item.partition("=")
        if not equals or not name.strip() or not path.strip():
            raise ValueError(f"expected adapters like sql=/adapters/sql, got {text!r:.100}")
        modules[name.strip()] = path.strip()
    return modules


def parse_json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object. Its values are validated with all other settings."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text!r:.100}")
    return value


def parse_ms_or_auto(text: str) -> float:
    """Parses a number of milliseconds; `auto` is the longest."""
    try:
        return LONGEST_MS if text.strip().lower() == "auto" else float(text)
    except ValueError:
        raise ValueError(f"expected a number of milliseconds or auto, got {text!r}") from None


def parse_origins(text: str) -> tuple[str, ...]:
    """Parses `https://a.example,http://localhost:3000`, `*`, or a JSON list as vLLM's `--allowed-origins`."""
    listed = text.strip().removeprefix("[").removesuffix("]")
    origins = tuple(origin.strip(" \"'").lower() for origin in listed.split(","))
    for origin in origins:
        scheme, separator, host = origin.partition("://")
        if origin != "*" and not (scheme and separator and host and "/" not in host):
            raise ValueError(f"expected origins like https://chat.example,http://localhost:3000, without a path, or *, got {text!r:.100}")
    return origins


def parse_host_and_port(text: str) -> tuple[str, int]:
    """Parses HOST:PORT, or [HOST]:PORT for an IPv6 address. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT, like 10.0.0.1:7000, got {text!r:.100}")
    return host.removeprefix("[").removesuffix("]"), int(port)
