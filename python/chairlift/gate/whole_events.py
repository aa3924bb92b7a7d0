"""Passes the events of a stream on whole, so that a stream that breaks off ends between two events."""

from __future__ import annotations

from chairlift.server.streaming import EventStream, JsonLines

MAX_EVENT = 1 << 16
"""Bytes of an event that wait for its end. Those of a longer one pass as they come."""

_ENDS = {EventStream.media_type: (b"\n\n", b"\r\n\r\n", b"\r\r"), JsonLines.media_type: (b"\n",)}
"""What ends an event, by the content type of the stream."""


class WholeEvents:
    """The bytes of one answer. Those of an answer that is no stream of events pass as they come."""

    def __init__(self, content_type: str) -> None:
        self._ends = _ENDS.get(content_type, ())
        self.begun = b""
        """The beginning of an event that has not ended."""

    def feed(self, data: bytes) -> bytes:
        """Returns what can pass now that `data` has come."""
        if not self._ends:
            return data
        data = self.begun + data
        cut = len(data) if data.endswith(self._ends) else max(data.rfind(end) + len(end) if end in data else 0 for end in self._ends)
        # A comment keeps the connection open. It may have no end of its own.
        if len(data) - cut > MAX_EVENT or (data.startswith(b":", cut) and data.endswith(b"\n")):
            cut = len(data)
        self.begun = data[cut:]
        return data[:cut]
