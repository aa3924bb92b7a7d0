"""Start-up decisions and their reasons."""

from __future__ import annotations

from typing import NamedTuple


class Decision(NamedTuple):
    """A line of the table that is logged at start-up."""

    what: str
    value: str
    reason: str


def asked(flag: str) -> str:
    """The reason for a value that a flag sets."""
    return f"{flag} says so"


def gib(size: float) -> str:
    """Formats a number of bytes."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"
