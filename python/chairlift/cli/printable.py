"""Texts that clients chose, for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text in one line without control characters, with which a client could clear the terminal or write what it likes there."""
    return "".join(character if character.isprintable() else "?" for character in text)
