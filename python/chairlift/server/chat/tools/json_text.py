"""JSON read as it comes: where a value ends, and whether it is one, without reading anything twice."""

from __future__ import annotations

import json
import re

_SPACE = " \t\n\r"
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")


class _Wrong(Exception):
    """A character cannot belong to the value."""


class JsonText:
    """One JSON value, of any depth, in pieces of any size.

    Control characters that a model writes raw into strings are escaped; everything else stays as it was written.
    """

    def __init__(self) -> None:
        self.done = self.broken = False
        self._open: list[str] = []
        self._next = "value"
        self._key = False
        self._rest = ""
        self._number: list[str] = []

    def read(self, text: str, at: int) -> tuple[str, int]:
        """Reads on in `text` from `at`: what it read, and where it stopped: behind the value if it is `done`, at the first character
        that can belong to none if it is `broken`, else at the end.
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
        except _Wrong:
            self.broken = True
        return "".join((*read, text[start:at])), at

    def _take(self, character: str) -> int:
        """Takes one character; 0 for one that is already behind the value, as behind numbers."""
        match self._next:
            case "string":
                self._in_string(character)
            case "escape":
                if character not in '"\\/bfnrtu':
                    raise _Wrong
                self._next, self._rest = ("hex", "1234") if character == "u" else ("string", "")
            case "hex":
                if character not in _HEX:
                    raise _Wrong
                self._rest = self._rest[1:]
                if not self._rest:
                    self._next = "string"
            case "literal":
                if character != self._rest[0]:
                    raise _Wrong
                self._rest = self._rest[1:]
                if not self._rest:
                    self._ended()
            case "number":
                if character not in "0123456789+-.eE":
                    if not _NUMBER.fullmatch("".join(self._number)):
                        raise _Wrong
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
        """Takes a character that is neither space nor inside of a string, number or word."""
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
            raise _Wrong

    def _begin(self, character: str) -> None:
        """Takes a value's first character."""
        if character == "{":
            self._open.append("}")
            self._next = "first key"
        elif character == "[":
            self._open.append("]")
            self._next = "first item"
        elif character == '"':
            self._next = "string"
        elif character in _LITERALS:
            self._next, self._rest = "literal", _LITERALS[character][1:]
        elif character in "-0123456789":
            self._next, self._number = "number", [character]
        else:
            raise _Wrong

    def _ended(self) -> None:
        self.done = not self._open
        self._next = "after"
