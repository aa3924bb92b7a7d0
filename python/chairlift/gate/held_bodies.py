"""The memory of the bodies that an upstream has still to get: most of their requests wait for their turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from chairlift.server.errors import unavailable

MAX_HELD_BYTES = 1 << 30
"""Bytes of all of them. What is kept beside a body takes up to four times as much."""


class HeldBodies:
    """Counts the bodies of each group of tenants. A group may hold as much as it leaves free for others."""

    def __init__(self) -> None:
        self._bodies: dict[int, tuple[str, bytearray]] = {}
        self._most = 0
        """Bytes of all of them, or more: a body is emptied when the upstream has it."""

    @contextmanager
    def holding(self, group: str, body: bytearray) -> Iterator[None]:
        """Counts a body in the block. Raises ApiError 503 if there is no room for it."""
        if self._most + len(body) > MAX_HELD_BYTES // 2:
            sizes = Counter[str]()
            for owner, held in self._bodies.values():
                sizes[owner] += len(held)
            self._most = sizes.total()
            if sizes[group] + len(body) > MAX_HELD_BYTES - self._most:
                raise unavailable("too many requests with long bodies are waiting: try again later", "queue_full", 1)
        self._most += len(body)
        self._bodies[id(body)] = group, body
        try:
            yield
        finally:
            self._most -= len(body)
            del self._bodies[id(body)]
