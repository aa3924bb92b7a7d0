"""A tool call as it comes out of a model's text, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call: the first of a call has its `id` and `name`, and all have the next part of its arguments."""

    position: int
    """Which of the answer's calls, from 0."""
    arguments: str = ""
    """Text that makes, put together, the arguments' JSON."""
    id: str | None = None
    name: str | None = None
