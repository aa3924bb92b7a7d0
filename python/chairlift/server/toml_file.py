"""Reading of the TOML files that flags name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidSetting


def read_text(flag: str, file: str) -> str:
    """Returns the text of a file. Raises InvalidSetting that begins with `flag`."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidSetting(f"{flag}: it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidSetting(f"{flag}: it is not UTF-8 text") from None


def read_toml(flag: str, file: str) -> tuple[dict[str, Any], str]:
    """Returns the tables of a file and its text, for `line_of`. Raises InvalidSetting that begins with `flag`."""
    import tomllib  # only a file needs it

    text = read_text(flag, file)
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        raise InvalidSetting(f"{flag}: it is not TOML: {error}") from None


def line_of(text: str, name: str, key: str | None = None) -> str:
    """Returns `, line N` of the table `name`, or of its `key`; nothing if it is written in another form.

    A value outside the tables has a `name` alone. A key in a table of one line, or that is a table itself, has the line of that table.
    """
    table, owner = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        left, equals, _ = (part.strip(" \t\"'") for part in line.partition("="))
        if header := re.match(r"\s*\[([^]]*)\]", line):
            table = re.sub(r"[\"']", "", header[1]).strip()
            found = table == (name if key is None else f"{name}.{key}")
        else:
            found = bool(equals) and (table, left) == (("", name) if key is None else (name, key))
        if found:
            return f", line {number}"
        if not owner and (table == name or (table, left) == ("", name)):
            owner = f", line {number}"
    return owner
