"""What was decided at the start, and why."""

from __future__ import annotations

from typing import NamedTuple


class Decision(NamedTuple):
    """A line of the table that is logged at the start: what was decided, how much or which of it, and why."""

    what: str
    value: str
    reason: str


def asked(flag: str) -> str:
    """The reason of what somebody asked for."""
    return f"{flag} says so"


def gib(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.0f} MiB"
