"""The memory of all bodies that are arriving, which count towards no limit of a tenant yet, or have no end in sight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from chairlift.server.errors import unavailable

MAX_BODIES_BYTES = 64 << 20
"""Bytes of all bodies that are arriving, or four times the longest body if that is more."""


@dataclass(eq=False, slots=True)
class _Body:
    """A body that arrives."""

    group: str
    deadline: asyncio.Timeout
    size: int = 0
    refused: bool = False


@dataclass(slots=True)
class _Group:
    """The bodies of some tenants, oldest first."""

    bodies: dict[_Body, None] = field(default_factory=dict)
    size: int = 0


class Bodies:
    """The bodies that are arriving.

    Beyond `limit` bytes in memory, the oldest body of the group of tenants with the most bytes is refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._groups: dict[str, _Group] = {}

    @asynccontextmanager
    async def arriving(self, group: str) -> AsyncIterator[_Body]:
        """Counts a body in the block. If the body is refused, the block is cancelled and raises ApiError 503."""
        body = _Body(group, asyncio.timeout(None))
        self._groups.setdefault(group, _Group()).bodies[body] = None
        try:
            async with body.deadline:
                yield body
        except TimeoutError:
            if not body.refused:
                raise
            refusal = unavailable("too many bodies are arriving, and this one was the oldest: try again later", "overloaded", 1)
            refusal.headers["connection"] = "close"  # the rest of the body stays unread
            raise refusal from None
        finally:
            self._remove(body)

    def resize(self, body: _Body, size: int) -> None:
        """Called when another number of the body's bytes is in memory."""
        if body.refused:
            return
        more, body.size = size - body.size, size
        self._groups[body.group].size += more
        self._size += more
        while self._size > self._limit:
            largest = max(self._groups.values(), key=lambda group: group.size)
            oldest = next(iter(largest.bodies))
            oldest.refused = True
            oldest.deadline.reschedule(0)  # it expires at once
            self._remove(oldest)

    def _remove(self, body: _Body) -> None:
        group = self._groups.get(body.group)
        if group is None or body not in group.bodies:
            return
        del group.bodies[body]
        group.size -= body.size
        self._size -= body.size
        if not group.bodies:
            del self._groups[body.group]
