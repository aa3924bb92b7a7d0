"""The request that is being answered, for those who log it or trace it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class About:
    """A request's id, and the headers that say which trace it is part of (W3C's `traceparent` and `tracestate`)."""

    request_id: str
    trace: dict[str, str] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)
    """When the request's first byte was read, on the monotonic clock."""
    received: float | None = None
    """When its body was read whole."""

    def spent(self) -> dict[str, float]:
        """The states of its timeline until now, with their seconds."""
        now = time.monotonic()
        received = now if self.received is None else self.received
        return {"receive": received - self.arrived, "tokenize": now - received}


ABOUT: ContextVar[About | None] = ContextVar("about", default=None)
"""Set for as long as a request is answered, in the task that does so and in those that it starts."""

_TRACE = (b"traceparent", b"tracestate")


FIRST_BYTE = "first_byte"
"""The entry of an ASGI scope's state with the time at which the request's first byte was read."""


def begin(request_id: str, headers: Iterable[tuple[bytes, bytes]], first_byte: float | None) -> None:
    """From here on, this task is about that request, which came when its `first_byte` was read (None: just now)."""
    trace = {name.decode(): value.decode("latin-1") for name, value in headers if name in _TRACE}
    ABOUT.set(About(request_id, trace, time.monotonic() if first_byte is None else first_byte))


def received() -> None:
    """Notes that the body of this task's request was read whole."""
    if (about := ABOUT.get()) is not None:
        about.received = time.monotonic()
