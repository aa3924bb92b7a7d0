"""Reads JSON that a model writes: an incremental validator, which reads no text twice, and arguments that may be incomplete."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

_SPACE = " \t\n\r"
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")


def parsed_object(text: str) -> dict[str, Any]:
    """Parses a call's arguments as an object, as far as the model's JSON is valid."""
    try:
        parsed = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


class _InvalidJson(Exception):
    """The character cannot belong to the value."""


class JsonText:
    """One JSON value of any depth, read in pieces of any size.

    Raw control characters in strings are escaped; everything else stays as the model wrote it.
    """

    def __init__(self) -> None:
        self.done = self.invalid = False
        self._open: list[str] = []
        self._next = "value"
        self._key = False
        self._remaining = ""
        self._number: list[str] = []

    def read(self, text: str, at: int) -> tuple[str, int]:
        """Reads on in `text` from `at`. Returns the text read and the position after it.

        That is the end of the value if it is `done`, the first invalid character if it is `invalid`, else the end of `text`.
        """
        read: list[str] = []
        start = at
        try:
            while at < len(text) and not self.done:
                if self._next == "string":
                    if plain := _PLAIN.match(text, at):
                        at = plain.end()
                        continue
                    if text[at] < " ":
                        read += (text[start:at], json.dumps(text[at])[1:-1])
                        start = at = at + 1
                        continue
                at += self._take(text[at])
        except _InvalidJson:
            self.invalid = True
        return "".join((*read, text[start:at])), at

    def _take(self, character: str) -> int:
        """Consumes one character; returns 0 for a character after the value, as after numbers."""
        match self._next:
            case "string":
                self._in_string(character)
            case "escape":
                if character not in '"\\/bfnrtu':
                    raise _InvalidJson
                self._next, self._remaining = ("hex", "1234") if character == "u" else ("string", "")
            case "hex":
                if character not in _HEX:
                    raise _InvalidJson
                self._remaining = self._remaining[1:]
                if not self._remaining:
                    self._next = "string"
            case "literal":
                if character != self._remaining[0]:
                    raise _InvalidJson
                self._remaining = self._remaining[1:]
                if not self._remaining:
                    self._ended()
            case "number":
                if character not in "0123456789+-.eE":
                    if not _NUMBER.fullmatch("".join(self._number)):
                        raise _InvalidJson
                    self._ended()
                    return 0
                self._number.append(character)
            case _ if character not in _SPACE:
                self._between(character)
        return 1

    def _in_string(self, character: str) -> None:
        if character == "\\":
            self._next = "escape"
        elif self._key:
            self._key, self._next = False, "colon"
        else:
            self._ended()

    def _between(self, character: str) -> None:
        """Consumes a character outside of strings, numbers and literals."""
        expected = self._next
        if character in "}]" and self._open and character == self._open[-1] and expected in ("after", "first key", "first item"):
            self._open.pop()
            self._ended()
        elif expected == "colon" and character == ":":
            self._next = "value"
        elif expected == "after" and character == ",":
            self._next = "key" if self._open[-1] == "}" else "value"
        elif expected in ("key", "first key") and character == '"':
            self._key, self._next = True, "string"
        elif expected in ("value", "first item"):
            self._begin(character)
        else:
            raise _InvalidJson

    def _begin(self, character: str) -> None:
        """Consumes the first character of a value."""
        if character == "{":
            self._open.append("}")
            self._next = "first key"
        elif character == "[":
            self._open.append("]")
            self._next = "first item"
        elif character == '"':
            self._next = "string"
        elif character in _LITERALS:
            self._next, self._remaining = "literal", _LITERALS[character][1:]
        elif character in "-0123456789":
            self._next, self._number = "number", [character]
        else:
            raise _InvalidJson

    def _ended(self) -> None:
        self.done = not self._open
        self._next = "after"
