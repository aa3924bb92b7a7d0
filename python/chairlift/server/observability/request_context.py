"""What the server knows about an HTTP request before its body is parsed: its id, its trace and its first timestamps."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

FIRST_BYTE = "first_byte"
"""Entry of an ASGI scope's state: the monotonic time at which the request's first byte was read."""

TRACE_HEADERS = (b"traceparent", b"tracestate")
"""W3C Trace Context's headers."""


@dataclass(slots=True)
class RequestContext:
    """A request's id, its trace headers, and when its first byte and the end of its body were read."""

    request_id: str
    trace: dict[str, str] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)
    """When the first byte was read, in seconds of the monotonic clock."""
    received: float | None = None
    """When the body was complete."""

    def body_received(self) -> None:
        """Records that the body is complete."""
        self.received = time.monotonic()

    def elapsed(self) -> dict[str, float]:
        """The timeline's states so far, with their seconds."""
        now = time.monotonic()
        received = now if self.received is None else self.received
        return {"receive": received - self.arrived, "tokenize": now - received}


LOGGED: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)
"""The request that log records of this task belong to. Other code takes the context from `request.state.context`."""
