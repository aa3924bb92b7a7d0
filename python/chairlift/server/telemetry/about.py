"""The request that is being answered, for those who log it or trace it."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class About:
    """A request's id, and the headers that say which trace it is part of (W3C's `traceparent` and `tracestate`)."""

    request_id: str
    trace: dict[str, str] = field(default_factory=dict)


ABOUT: ContextVar[About | None] = ContextVar("about", default=None)
"""Set for as long as a request is answered, in the task that does so and in those that it starts."""

_TRACE = (b"traceparent", b"tracestate")


def begin(request_id: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """From here on, this task is about that request."""
    ABOUT.set(About(request_id, {name.decode(): value.decode("latin-1") for name, value in headers if name in _TRACE}))
