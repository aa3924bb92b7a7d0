"""Data about an HTTP request that is known before its body is parsed: id, trace headers and timestamps."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from chairlift.server.session_name import SessionName

FIRST_BYTE = "first_byte"
"""Key in an ASGI scope's state: the monotonic time when the request's first byte was read."""

TRACE_HEADERS = (b"traceparent", b"tracestate")
"""Headers of W3C Trace Context."""


@dataclass(slots=True)
class RequestContext:
    """A request's id and trace headers, and when its first byte and its body were read."""

    request_id: str
    trace: dict[str, str] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)
    """When the first byte was read, in seconds of the monotonic clock."""
    received: float | None = None
    """When the body was complete."""
    session: SessionName | None = None
    """The session that the request's headers name."""
    waited_for_model: float = 0.0
    """Seconds that the request waited until its model was loaded."""
    paced: float = 0.0
    """Seconds that the request waited because its tenant had taken more than its share of the server's own time."""

    def body_received(self) -> None:
        """Records that the body is complete."""
        self.received = time.monotonic()

    def elapsed(self) -> dict[str, float]:
        """Returns the seconds in each state of the timeline so far."""
        now = time.monotonic()
        received = now if self.received is None else self.received
        pace = {"pace": self.paced} if self.paced else {}
        restart = {"restart": self.waited_for_model} if self.waited_for_model else {}
        return {"receive": received - self.arrived - self.paced, **pace, **restart, "tokenize": now - received - self.waited_for_model}


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)
"""The request that this task's log records belong to. Other code uses `request.state.context`."""
